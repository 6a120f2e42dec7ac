"""The torch engine with drafters: whatever a drafter guesses, the responses are those of plain decoding."""

import math
from dataclasses import replace
from itertools import count

import pytest
import torch

from storage.records.records import SamplingParams
from tasks.configuration.rollout import DRAFTS_MAX
from tasks.sampling.engines import torch_engine
from tasks.sampling.engines.batch import Batch
from tasks.sampling.engines.drafter import WIDTHS
from tasks.sampling.engines.engine import EngineError, FinishReason
from tasks.sampling.engines.kernels import Kernels
from tasks.sampling.engines.row_attention import plain
from tasks.sampling.engines.scripted_drafter import ScriptedDrafter, changing, perfect, wrong
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.engines.suffix_drafter import SuffixDrafter
from tasks.sampling.engines.testing import (
    CONTEXT_LENGTH,
    ENDLESS,
    STOPS,
    TURNS,
    EngineContract,
    Result,
    answered,
    assert_same,
    drain,
    request,
    resumed,
    run,
)
from tasks.sampling.engines.torch_engine import TorchEngine
from tests.recorded_steps import FROM_THE_HOST, WAITS, Operations, Recorder
from tests.tiny_model import VOCAB_SIZE, tiny_config, tiny_model, weight_blocks
from tests.wrong_verifications import WRONG_VERIFICATIONS

FAMILIES = {
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": False},
    "gpt_neox": {},
    "gpt2": {"n_inner": 96},
}
# Drafters by name, made from the function that knows the answers.
DRAFTERS = {
    "perfect": lambda answer: ScriptedDrafter(VOCAB_SIZE, perfect, answer=answer),
    "wrong": lambda answer: ScriptedDrafter(VOCAB_SIZE, wrong, answer=answer),
    "random": lambda _: ScriptedDrafter(VOCAB_SIZE, wrong, ragged=True, seed=4),
    "half": lambda answer: ScriptedDrafter(VOCAB_SIZE, lambda _: 0.5, answer=answer, ragged=True, seed=1),
    "mostly": lambda answer: ScriptedDrafter(VOCAB_SIZE, lambda _: 0.8, answer=answer, ragged=True, seed=2),
    "changing": lambda answer: ScriptedDrafter(VOCAB_SIZE, changing, answer=answer),
    "suffix": lambda _: SuffixDrafter(rows=8, context_length=CONTEXT_LENGTH),
}


@pytest.fixture(scope="module")
def models():
    return {family: tiny_model(tiny_config(family, **changes)) for family, changes in FAMILIES.items()}


def make_engine(model_dir, model, *, rows=8, speculation=None, context_length=CONTEXT_LENGTH, kernels=None):
    model.config.save_pretrained(model_dir)
    engine = TorchEngine(
        model_dir,
        device="cpu",
        max_responses_in_flight=rows,
        context_length=context_length,
        kernels=kernels,
        speculation=speculation,
    )
    engine.load_weights(0, weight_blocks(model))
    return engine


def answers_of(engine):
    """What plain decoding adds to any request."""
    known = {}

    def ask(item):
        if item not in known:
            known[item] = tuple(run(engine, [item])[item.response].token_ids)
        return known[item]

    def answer(item):
        count, whole = len(item.generated_ids), ask(replace(item, generated_ids=()))
        return whole[count:] if whole[:count] == item.generated_ids else ask(item)

    return answer


@pytest.fixture(scope="module")
def answers(tmp_path_factory, models):
    """By family, what plain decoding adds to any request."""
    folder = tmp_path_factory.mktemp
    return {family: answers_of(make_engine(folder(family), model)) for family, model in models.items()}


class _Contract(EngineContract):
    family, drafter, drafts, records = "qwen2", "mostly", 4, False

    @pytest.fixture
    def engine_factory(self, tmp_path, models, answers, monkeypatch):
        if self.records:
            # In float32 on a CPU matrices are kept in oneDNN's layout, which no recording could read.
            monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        model = models[self.family]

        def make(rows):
            speculation = Speculation(DRAFTERS[self.drafter](answers[self.family]), self.drafts)
            kernels = Kernels(plain, Recorder()) if self.records else None
            return make_engine(tmp_path, model, rows=rows, speculation=speculation, kernels=kernels)

        return make

    def weights(self, version):
        return weight_blocks(tiny_model(tiny_config(self.family, **FAMILIES[self.family]), seed=version))

    def release(self, engine):
        assert engine._graphs is None or engine._graphs._record is not None, "a step could not be recorded"
        super().release(engine)


@pytest.mark.slow
class TestMostlyRight(_Contract):
    pass


@pytest.mark.exhaustive
class TestChangingRecorded(_Contract):
    drafter, drafts, records = "changing", 8, True


@pytest.mark.exhaustive
class TestChoosingRandomGuesses(_Contract):
    family, drafter, drafts = "gpt_neox", "random", "auto"


@pytest.mark.exhaustive
class TestPerfect(_Contract):
    drafter, drafts = "perfect", 8


@pytest.mark.exhaustive
class TestWrong(_Contract):
    drafter, drafts = "wrong", 2


@pytest.mark.exhaustive
class TestPerfectByAModelsOwnCode(_Contract):
    family, drafter, drafts = "gpt_neox", "perfect", 3


@pytest.mark.exhaustive
class TestSuffixes(_Contract):
    drafter, drafts = "suffix", 4


@pytest.mark.exhaustive
class TestRandomRecorded(_Contract):
    drafter, drafts, records = "random", 8, True


def mixed_requests():
    """Eight requests that end by a stop token, by their length and by the context, sampled in three ways."""
    samplings = (
        SamplingParams(max_completion_length=CONTEXT_LENGTH),
        SamplingParams(max_completion_length=60, stop_token_ids=STOPS, temperature=0.7, top_p=0.9, top_k=20),
        replace(ENDLESS, temperature=0.0),
        SamplingParams(max_completion_length=70, stop_token_ids=tuple(range(3, VOCAB_SIZE, 12))),
    )
    return [replace(request(r), sampling=samplings[r % 4]) for r in range(8)]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory, models):
    """By family, plain decoding's answer to `mixed_requests`."""
    folder = tmp_path_factory.mktemp
    return {family: run(make_engine(folder(family), model), mixed_requests()) for family, model in models.items()}


def check_identity(model_dir, models, answers, results, family, drafts, drafter):
    speculation = Speculation(DRAFTERS[drafter](answers[family]), drafts)
    found = run(make_engine(model_dir, models[family], speculation=speculation), mixed_requests())
    assert_same(found, results)
    totals = speculation.totals
    assert totals.tokens == sum(len(result.token_ids) for result in results.values())
    assert {result.finish_reason for result in results.values()} == set(FinishReason)
    if drafter == "perfect":
        # Drafts beyond the end of a response are fed and count for nothing.
        assert totals.steps <= sum(math.ceil(len(result.token_ids) / (drafts + 1)) + 1 for result in results.values())
    if drafter == "wrong":
        assert totals.accepted == 0 < totals.drafted


@pytest.mark.parametrize(
    ("family", "drafts", "drafter"),
    [
        ("qwen2", 1, "perfect"),
        ("qwen2", 8, "changing"),
        ("qwen2", 3, "wrong"),
        ("qwen3", 2, "random"),
        ("llama", 4, "suffix"),
        ("gpt_neox", 8, "perfect"),
        ("gpt_neox", 4, "half"),
        ("gpt2", 5, "mostly"),
    ],
)
def test_responses_are_those_of_plain_decoding(tmp_path, models, answers, wanted, family, drafts, drafter):
    check_identity(tmp_path, models, answers, wanted[family], family, drafts, drafter)


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("drafts", range(1, DRAFTS_MAX + 1))
@pytest.mark.parametrize("family", FAMILIES)
def test_responses_are_those_of_plain_decoding_with_every_drafter(
    tmp_path, models, answers, wanted, family, drafts, drafter
):
    check_identity(tmp_path, models, answers, wanted[family], family, drafts, drafter)


@pytest.mark.slow
def test_256_responses_with_kills_and_another_drafter_after_each(tmp_path, models):
    """Responses move between engines with different drafters every few steps, in the middle of what was drafted."""
    plain_engine = make_engine(tmp_path, models["qwen2"], rows=64)
    sampling = SamplingParams(max_completion_length=48, stop_token_ids=STOPS)
    items = [replace(request(r), sampling=sampling) for r in range(256)]
    whole = {}
    for start in range(0, 256, 64):
        whole |= run(plain_engine, items[start : start + 64])

    def answer(item):
        return whole[item.response].token_ids[len(item.generated_ids) :]

    engines = [
        make_engine(tmp_path, models["qwen2"], rows=64, speculation=Speculation(make(answer), drafts))
        for make, drafts in zip(
            map(DRAFTERS.get, ("mostly", "suffix", "random", "changing")), (4, 8, 2, 3), strict=True
        )
    ]
    results = {item.response: Result() for item in items}
    for turn in count():
        waiting = [item for item in items if results[item.response].finish_reason is None]
        if not waiting:
            break
        batch = [resumed(item, results[item.response].token_ids) for item in waiting[:64]]
        engine = engines[turn % 4]
        engine.start(batch)
        drain(engine, results, max_steps=5)
        engine.abort([item.response for item in batch])
    assert_same(results, whole)
    assert sum(engine._speculation.totals.accepted for engine in engines) > 500


@pytest.mark.parametrize("records", [False, True])
def test_turns_that_end_inside_a_draft_go_on_after_their_answer(tmp_path, models, answers, records, monkeypatch):
    if records:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    kernels = Kernels(plain, Recorder()) if records else None
    engines = [
        make_engine(tmp_path, models["qwen2"], speculation=speculation, kernels=kernels)
        for speculation in (None, Speculation(DRAFTERS["perfect"](answers["qwen2"]), 8))
    ]
    turns = ([], [])
    for engine, found in zip(engines, turns, strict=True):
        for response in range(4):
            back = replace(request(response), sampling=TURNS)
            while back is not None:
                back = answered(back, run(engine, [back])[response], found)
    assert len(turns[0]) > 8
    for mine, theirs in zip(*turns, strict=True):
        assert_same({0: mine}, {0: theirs})
    assert engines[0].prefill_tokens == engines[1].prefill_tokens


@pytest.mark.parametrize("context_length", [256, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_drafts_at_the_contexts_end_spoil_no_other_response(tmp_path, models, context_length, monkeypatch):
    """Rows end one after the other, while further rows still take eight drafts."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    endless, prompt_length = SamplingParams(max_completion_length=999), context_length - 30
    items = [replace(request(r), sampling=endless, prompt_ids=(5 + r,) * (prompt_length - 3 * r)) for r in range(5)]
    model = models["qwen2"]
    plain_engine = make_engine(tmp_path, model, context_length=context_length)
    results, answer = run(plain_engine, items), answers_of(plain_engine)
    for kernels, drafter in (
        (None, "perfect"),
        (Kernels(plain), "wrong"),
        (Kernels(plain, Recorder()), "perfect"),
    ):
        speculation = Speculation(DRAFTERS[drafter](answer), 8)
        engine = make_engine(tmp_path, model, context_length=context_length, kernels=kernels, speculation=speculation)
        assert_same(run(engine, items), results)
        # What the rows have kept is right, too.
        again = run(engine, [resumed(item, results[item.response].token_ids[:7]) for item in items])
        for response, rest in again.items():
            assert rest.token_ids == results[response].token_ids[7:]


def test_a_step_without_drafts_is_a_plain_step(tmp_path, models):
    """It runs the operations of an engine without a drafter; one with drafts waits once and takes one copy."""

    def operations(speculation):
        engine = make_engine(tmp_path, models["qwen2"], speculation=speculation)
        engine.start([request(r, ENDLESS) for r in range(6)])
        for _ in range(2):
            engine.step()
        with Operations() as found:
            engine.step()
        return found

    silent = operations(Speculation(SuffixDrafter(rows=8, context_length=CONTEXT_LENGTH), 0))
    without = operations(None)
    assert [call[0] for call in silent.calls] == [call[0] for call in without.calls]
    drafting = operations(Speculation(ScriptedDrafter(VOCAB_SIZE, wrong), 4))
    assert drafting.named(*WAITS) == []
    assert len(drafting.named(*FROM_THE_HOST)) == 1


def test_tokens_that_no_vocabulary_has_are_not_fed(tmp_path, models):
    class Strange(ScriptedDrafter):
        def draft(self, responses, most):
            return [(3, (-1, VOCAB_SIZE)[response % 2], *range(most)) for response in responses]

    speculation = Speculation(Strange(VOCAB_SIZE, wrong), 8)
    items = mixed_requests()
    found = run(make_engine(tmp_path, models["qwen2"], speculation=speculation), items)
    assert_same(found, run(make_engine(tmp_path, models["qwen2"]), items))
    assert speculation.totals.drafted > 0


def test_another_number_of_drafts_than_there_is_is_refused():
    with pytest.raises(EngineError, match=r"drafts: value 9; allowed: auto, 0\.\.8"):
        Speculation(ScriptedDrafter(VOCAB_SIZE, wrong), 9)
    assert WIDTHS[-1] == DRAFTS_MAX + 1


@pytest.fixture
def mostly_right(tmp_path, models, answers, wanted):
    """An engine with good drafts, what it should give, and how it differs."""
    speculation = Speculation(DRAFTERS["mostly"](answers["qwen2"]), 4)
    engine = make_engine(tmp_path, models["qwen2"], speculation=speculation)

    def differs():
        try:
            assert_same(run(engine, mixed_requests()), wanted["qwen2"])
        except (AssertionError, IndexError):
            return True
        return False

    return engine, differs


def test_planted_bugs_are_found(mostly_right, monkeypatch):
    engine, differs = mostly_right
    assert not differs()
    spread, advance = Batch.spread, Batch.advance

    def same_position(self, width):
        fed = spread(self, width)
        return replace(fed, positions=self.positions.repeat_interleave(width))

    def fed_further(self, drawn):
        advance(self, drawn)
        self.cached += len(drawn) > len(self.token_ids)

    for planted in WRONG_VERIFICATIONS:
        with monkeypatch.context() as context:
            context.setattr(torch_engine, "verified", planted)
            assert differs(), planted.__name__
        engine.abort(range(8))
    for name, planted in (("spread", same_position), ("advance", fed_further)):
        with monkeypatch.context() as context:
            context.setattr(Batch, name, planted)
            assert differs(), planted.__name__
        engine.abort(range(8))
