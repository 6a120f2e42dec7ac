"""Scores by vLLM's CPU build beside torch's: of an engine, of a teacher, and of scorers that journal them."""

import json
import multiprocessing
import os
import signal
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from storage.clock import SystemClock
from storage.journal.liveness import read_heartbeat
from storage.records import layout
from storage.records.run import read_plan
from storage.stores.memory import NestedStore
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.rollout import VllmConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import collate
from tasks.learning.score_iteration import score_iteration
from tasks.learning.score_journal import ScoreJournal
from tasks.learning.teachers import Teacher
from tasks.learning.vllm_teachers import VllmTeacher, VllmTeachers
from tasks.sampling.engines import vllm_scores
from tasks.sampling.engines.engine import EngineDied, EngineError
from tasks.sampling.engines.vllm_scores import VllmScorer
from tests.dying_store import Killed
from tests.scored_run import SCORING, URL, opened, session, settings
from tests.small_run import everything, memory_store, model_directory, plan_iteration, roll_out, train_small
from tests.tiny_model import VOCAB_SIZE, save_tiny_model, tiny_model, weight_blocks
from tests.vllm_engines import MISSING, WHY_NOT, vllm_tiny_config

pytestmark = [pytest.mark.skipif(MISSING, reason=WHY_NOT), pytest.mark.filterwarnings("default")]
# Of log-probs in float32; 7e-5 is the largest difference seen, in sequences of 1,000 tokens.
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
    batch = collate([4, 5, 6], prompts, responses, [[-1.0] * 20, [-1.0], [-1.0] * 23], [(20,), (1,), (11, 10, 12)])
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    theirs = Teacher(folder, tensors, TrainerConfig(device="cpu"), trainable=False)
    for top_k in (1, TOP_K):
        ours = VllmTeacher(scorer).scores(batch, 0.8, top_k, VOCAB_SIZE)
        expected = theirs.scores(batch, 0.8, top_k, VOCAB_SIZE)
        assert torch.equal(ours.head_ids, expected.head_ids)
        assert torch.equal(ours.agrees, expected.agrees)
        assert (ours.logprobs - expected.logprobs).abs().max() < CLOSE
        assert (ours.head_logprobs - expected.head_logprobs).abs().max() < CLOSE


def test_without_the_models_weights_nothing_is_scored(folder):
    with pytest.raises(EngineError, match="weights: missing"):
        VllmScorer(folder, {}, dtype="float32", longest=64, top_k=1, config=VllmConfig(process="same"))


def test_a_killed_vllm_ends_the_scorer_by_an_error_that_a_task_repeats(folder, model):
    others = set(multiprocessing.active_children())
    scorer = started(folder, model, process="own")
    with closing(scorer):
        [own] = scorer.scores(drawn([40]), temperature=0.8, vocabulary=VOCAB_SIZE)
        assert np.abs(own.logprobs[:, 0] - by_torch(model, drawn([40])[0], 0.8, VOCAB_SIZE)[0]).max() < CLOSE
        for child in set(multiprocessing.active_children()) - others:
            os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            scorer.scores(drawn([40]), temperature=0.8, vocabulary=VOCAB_SIZE)
    assert set(multiprocessing.active_children()) <= others


@pytest.fixture(scope="module", params=[None, 4], ids=["sampled", "head"])
def rolled_out(request, folder, tmp_path_factory):
    """All objects of a run whose first rollout has ended, and whose teacher has a pool of scorers by vLLM."""
    policy = model_directory(tmp_path_factory.mktemp("model"))
    store = memory_store("scored")
    teacher = {"path": str(folder), "top_k": request.param, "pool": "teachers", "engine": "vllm", "vllm": SAME}
    plan_iteration(settings(policy, teacher, rollout={"context_length": 128}))
    roll_out(URL, 0)
    return everything(store)


def journalled(store):
    """(ids, log-probs) that stand for the scores of each response, as claims count them."""
    plan = read_plan(store, 0)
    journal = ScoreJournal(store, plan, 0)
    journal.refresh()
    found = map(journal.reader.assemble, range(plan.num_responses))
    return [(each.token_ids, each.logprobs) for each in found]


def assert_close(found, expected):
    for (ids, logprobs), (their_ids, theirs) in zip(found, expected, strict=True):
        assert np.array_equal(ids, their_ids)
        assert np.abs(logprobs - theirs).max() < CLOSE


def engines_told(store):
    within = NestedStore(store, SCORING.rstrip("/"))
    return [read_heartbeat(within, key).engine for key in within.list(layout.alive_all(0))]


def test_what_vllm_refuses_names_the_field_of_the_teacher(rolled_out):
    store = opened(rolled_out)
    config = config_in_force(store, read_plan(store, 0))
    elsewhere = replace(config, trainer=replace(config.trainer, device="cuda"))
    with pytest.raises(EngineError, match=r"^teacher\.path: trainer\.device: value 'cuda', and vLLM [\d.]+ finds cpu"):
        VllmTeachers(store, elsewhere, config.teacher, VOCAB_SIZE).named("teacher")


def test_no_longer_sequences_are_expected_than_the_policy_reads(tmp_path, folder):
    """vLLM must have a cache for the longest, and the check of memory counts the policy's positions."""
    policy = model_directory(tmp_path)
    file = policy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 90}))
    store = memory_store("scored")
    teacher = {"path": str(folder), "pool": "teachers", "engine": "vllm", "vllm": SAME}
    plan_iteration(settings(policy, teacher))
    config = config_in_force(store, read_plan(store, 0))
    with closing(VllmTeachers(store, config, config.teacher, VOCAB_SIZE)) as teachers:
        scorer = teachers.named("teacher")._scorer
        assert len(scorer.scores(drawn([90]), temperature=1.0, vocabulary=VOCAB_SIZE)) == 1
        with pytest.raises(EngineError, match=r"vLLM refuses a request"):
            scorer.scores(drawn([92]), temperature=1.0, vocabulary=VOCAB_SIZE)


@pytest.mark.parametrize("rolled_out", [None], indirect=True, ids=["sampled"])
def test_no_process_of_vllm_outlives_a_session_that_cannot_write_its_last_heartbeat(rolled_out):
    others = set(multiprocessing.active_children())
    store = opened(rolled_out, writes=5)
    with pytest.raises(Killed):
        session(store, vllm=VllmConfig(process="own")).run()
    assert set(multiprocessing.active_children()) <= others


@pytest.fixture(scope="module")
def undisturbed(rolled_out):
    """The same run with all scores by one scorer, as objects."""
    store = opened(rolled_out)
    assert score_iteration(URL, 0, 0, lambda: False, SystemClock()) == 12
    return everything(store)


def test_a_pool_of_vllm_journals_the_scores_of_torch_and_a_trainer_trains_by_them(rolled_out, undisturbed):
    by_theirs = opened(rolled_out)
    session(by_theirs, engine="torch").run()
    expected = journalled(by_theirs)
    theirs = train_small(URL, 0)
    store = opened(undisturbed)
    assert engines_told(store) == ["vllm"]
    assert_close(journalled(store), expected)
    trained = train_small(URL, 0)
    assert trained.metrics["teacher/kl"] == pytest.approx(theirs.metrics["teacher/kl"], abs=CLOSE)
    assert trained.metrics["teacher/agreement"] == theirs.metrics["teacher/agreement"]


def test_a_killed_scorer_is_gone_on_with_at_its_next_token(rolled_out, undisturbed):
    """By another process of vLLM, and by one of torch where the settings have changed."""
    expected = journalled(opened(undisturbed))
    store = opened(rolled_out, writes=9)
    with pytest.raises(Killed):
        session(store).run()
    partly, objects = journalled(store), everything(store)
    assert 0 < sum(len(ids) for ids, _ in partly) < sum(len(ids) for ids, _ in expected)
    for following in ("vllm", "torch"):
        store = opened(objects)
        session(store, scorer=1, engine=following).run()
        found = journalled(store)
        assert_close(found, expected)
        assert sorted(engines_told(store)) == sorted(["vllm", following])
        for (ids, logprobs), (_, whole) in zip(partly, found, strict=True):
            assert np.array_equal(whole[: len(ids)], logprobs)
