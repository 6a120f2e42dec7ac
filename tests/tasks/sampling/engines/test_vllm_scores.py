"""Scores by vLLM's CPU build beside torch's: of an engine, of a teacher, and of scorers that journal them."""

import multiprocessing
import os
import signal
from contextlib import closing, suppress

import numpy as np
import pytest
import torch

from storage.clock import ManualClock, SystemClock
from storage.journal.liveness import read_heartbeat
from storage.records import layout
from storage.records.run import read_plan
from storage.records.teacher_scores import decode_scores
from storage.stores.memory import NestedStore
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.rollout import VllmConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import collate
from tasks.learning.score_iteration import score_iteration
from tasks.learning.score_journal import ScoreJournal
from tasks.learning.teachers import Teacher
from tasks.learning.vllm_teachers import VllmTeacher
from tasks.sampling.engines import vllm_scores
from tasks.sampling.engines.engine import EngineDied, EngineError
from tasks.sampling.engines.vllm_scores import VllmScorer
from tests.dying_store import Killed
from tests.scored_run import SCORING, URL, opened, session, settings
from tests.small_run import everything, memory_store, model_directory, plan_iteration, roll_out, train_small
from tests.tiny_model import VOCAB_SIZE, save_tiny_model, tiny_model, weight_blocks
from tests.vllm_engines import MISSING, WHY_NOT, vllm_tiny_config

pytestmark = [pytest.mark.skipif(MISSING, reason=WHY_NOT), pytest.mark.filterwarnings("default")]
# Of log-probs in float32; 8e-6 is the largest difference seen.
CLOSE = 1e-4
LONGEST, TOP_K = 255, 5
SAME = {"process": "same"}


@pytest.fixture(scope="module")
def model():
    """One that uses all its 256 positions for a sequence of LONGEST."""
    return tiny_model(vllm_tiny_config(), seed=4)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), model)


def started(folder, model, *, process="same", top_k=TOP_K):
    return VllmScorer(
        folder,
        weight_blocks(model),
        dtype="float32",
        longest=LONGEST,
        top_k=top_k,
        config=VllmConfig(process=process),
    )


@pytest.fixture(scope="module")
def scorer(folder, model):
    with pytest.MonkeyPatch.context() as patch:
        # Sequences longer than a step of vLLM come in parts.
        patch.setattr(vllm_scores, "STEP_TOKENS", 64)
        scorer = started(folder, model)
    yield scorer
    scorer.close()


def drawn(lengths, vocabulary=VOCAB_SIZE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def by_torch(model, tokens, temperature, vocabulary):
    """(log-probs of the tokens but the first, ids and log-probs of the head), by one forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1, :vocabulary]
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    head = logprobs.topk(TOP_K, dim=1)
    own = logprobs[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    return own.numpy(), head.indices.numpy(), head.values.numpy()


@pytest.mark.parametrize(("temperature", "vocabulary"), [(0.8, VOCAB_SIZE), (1.0, 80), (1.7, 80)])
def test_scores_are_those_of_a_forward_pass(scorer, model, temperature, vocabulary):
    sequences = drawn([2, LONGEST, 3, 64, 65, 200, *[30] * 14], vocabulary)
    found = scorer.scores(sequences, temperature=temperature, vocabulary=vocabulary)
    for tokens, scores in zip(sequences, found, strict=True):
        own, ids, head = by_torch(model, tokens, temperature, vocabulary)
        assert scores.ids.shape == (len(tokens) - 1, 1 + TOP_K)
        assert np.array_equal(scores.ids[:, 1:], ids)
        assert np.abs(scores.logprobs[:, 0] - own).max() < CLOSE
        assert np.abs(scores.logprobs[:, 1:] - head).max() < CLOSE


def test_a_sequence_beyond_the_longest_is_refused_and_the_next_is_scored(scorer):
    with pytest.raises(EngineError, match=r"vLLM refuses a request: .*256"):
        scorer.scores(drawn([LONGEST + 1, 5]), temperature=1.0, vocabulary=VOCAB_SIZE)
    [scores] = scorer.scores(drawn([5]), temperature=1.0, vocabulary=VOCAB_SIZE)
    assert len(scores.ids) == 4


def test_a_teacher_in_vllm_scores_as_one_in_torch(scorer, folder, model):
    """Responses of several lengths, one with observations, whose tokens get no scores."""
    prompts, responses = drawn([7, 7, 3], seed=1), drawn([20, 1, 33], seed=2)
    batch = collate(
        [4, 5, 6], prompts, responses, [[-1.0] * 20, [-1.0], [-1.0] * 23], [(20,), (1,), (11, 10, 12)]
    )
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    theirs = Teacher(folder, tensors, TrainerConfig(device="cpu"), trainable=False)
    for top_k in (1, TOP_K):
        ours = VllmTeacher(scorer).scores(batch, 0.8, top_k, VOCAB_SIZE)
        expected = theirs.scores(batch, 0.8, top_k, VOCAB_SIZE)
        assert torch.equal(ours.head_ids, expected.head_ids)
        assert torch.equal(ours.agrees, expected.agrees)
        assert (ours.logprobs - expected.logprobs).abs().max() < CLOSE
        assert (ours.head_logprobs - expected.head_logprobs).abs().max() < CLOSE


def test_weights_of_another_model_are_refused(folder, model):
    wrong = {"model.nothing.weight": TensorBlock.of(np.zeros((2, 2), np.float32))} if hasattr(TensorBlock, "of") else {}
    with pytest.raises(EngineError):
        VllmScorer(folder, wrong, dtype="float32", longest=64, top_k=1, config=VllmConfig(process="same"))
