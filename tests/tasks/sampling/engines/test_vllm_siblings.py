"""Drafts from siblings in vLLM: whole engines on its model runner V2, interpreted, against engines without drafts."""

import random
from dataclasses import replace

import pytest
import torch

from storage.records.records import SamplingParams
from tasks.configuration.rollout import SpeculationConfig, VllmConfig
from tasks.sampling.engines.drafter import Remembers
from tasks.sampling.engines.sibling_rows import LONGEST, NO_SCOPE, scope_of
from tasks.sampling.engines.testing import (
    CONTEXT_LENGTH,
    Result,
    assert_same,
    drain,
    request,
    run,
)
from tasks.sampling.engines.torch_engine import TorchEngine
from tests import vllm_interpreted
from tests.tiny_model import VOCAB_SIZE, tiny_model, weight_blocks
from tests.vllm_engines import MISSING, WHY_NOT, EnginePool, VllmContract, vllm_tiny_config
from tests.vllm_interpreted import INTERPRETED

# vLLM and its libraries warn while they are imported, and leave sockets to the garbage collector.
pytestmark = [pytest.mark.skipif(MISSING, reason=WHY_NOT), pytest.mark.filterwarnings("default")]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the child process of another test")
ROWS, DRAFTS = 8, 4
SPECULATION = SpeculationConfig(drafts=DRAFTS, source="siblings")
# Responses that hardly repeat themselves.
WILD = SamplingParams(max_completion_length=40, temperature=1.5)
KINDS = (
    SamplingParams(max_completion_length=40, temperature=0.0),
    SamplingParams(max_completion_length=40, stop_token_ids=(2, 11)),
    SamplingParams(max_completion_length=30, temperature=0.7, top_p=0.9, top_k=20),
    WILD,
)


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
@pytest.mark.skipif(vllm_interpreted.MISSING, reason=vllm_interpreted.WHY_NOT)
@pytest.mark.timeout(3700)
def test_on_model_runner_v2(tmp_path):
    vllm_interpreted.run_interpreted(__file__, tmp_path, 3600)


@pytest.fixture(scope="module")
def model():
    return tiny_model(vllm_tiny_config())


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = EnginePool(tmp_path_factory.mktemp("same"), VllmConfig(process="same"), SPECULATION)
    yield pool
    pool.close()


@pytest.fixture
def engine(pool):
    engine = pool.take(ROWS)
    yield engine
    pool.give_back(engine)


@pytest.fixture(scope="module")
def torch_engine(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("model")
    model.config.save_pretrained(folder)
    engine = TorchEngine(
        folder, dtype="float32", device="cpu", max_responses_in_flight=ROWS, context_length=CONTEXT_LENGTH
    )
    engine.load_weights(0, weight_blocks(model))
    yield engine
    engine.close()


def fresh(response, group, kind):
    """A request to a prompt of its group, which no other test has."""
    rnd = random.Random(group)
    return replace(request(response, kind), group=group, prompt_ids=tuple(rnd.randrange(4, 90) for _ in range(12)))


def twins(count, group):
    """Requests with the same prompt and noise, whose responses are equal."""
    key = request(group).noise_key
    return [replace(fresh(response, group, WILD), noise_key=key) for response in range(count)]


def runner_of(engine):
    return engine._core._engine.collective_rpc(lambda worker: worker.model_runner)[0]


def speculator_of(engine):
    return runner_of(engine).speculator


def counted(engine, items):
    """What the engine gives, and in how many steps."""
    results = {item.response: Result() for item in items}
    engine.start(items)
    steps = 0
    while drain(engine, results, max_steps=1) and any(result.finish_reason is None for result in results.values()):
        steps += 1
    return results, steps + 1


@interpreted
@pytest.mark.exhaustive
def test_every_kind_of_sampling_draws_what_it_draws_without_drafts(engine, torch_engine):
    assert engine.name.endswith("in runner V2, drafts by siblings")
    assert type(speculator_of(engine)).__name__ == "SiblingSpeculator"
    assert isinstance(engine, Remembers)
    items = [fresh(response, 1000 + response // 4, KINDS[response % 4]) for response in range(ROWS)]
    wanted = run(torch_engine, items)
    # Twice: the second time whole responses of the same prompts are at hand.
    first, steps = counted(engine, items)
    assert_same(first, wanted)
    again, steps_again = counted(engine, items)
    assert_same(again, wanted)
    assert steps_again < 0.6 * steps


@interpreted
def test_running_siblings_draft_for_those_behind_them(engine, torch_engine):
    first, *others = twins(4, 1100)
    first = replace(first, sampling=replace(WILD, max_completion_length=60))
    wanted = run(torch_engine, [first])[0].token_ids
    engine.start([first])
    results = {item.response: Result() for item in [first, *others]}
    while len(results[0].token_ids) < 30:
        drain(engine, results, max_steps=1)
    engine.start(others)
    drain(engine, results, max_steps=6)
    assert results[0].finish_reason is None
    # A step for the prompt, and then four with all drafts right, less one for what is on its way.
    assert all(len(results[item.response].token_ids) >= 1 + 3 * (1 + DRAFTS) for item in others)
    drain(engine, results)
    assert all(result.token_ids == wanted[: len(result.token_ids)] for result in results.values())


@interpreted
@pytest.mark.exhaustive
def test_finished_siblings_draft_after_their_slots_have_gone_to_other_groups(engine):
    early, late = twins(2, 1200)
    wanted, alone = counted(engine, [early])
    run(engine, [fresh(2 + row, 1201 + row, WILD) for row in range(ROWS)])
    rows = speculator_of(engine).books
    slots = [row for row in rows._rows[scope_of(early.prompt_ids)] if row < ROWS]
    assert not slots
    found, steps = counted(engine, [late])
    assert found[1].token_ids == wanted[0].token_ids
    assert steps < 0.4 * alone


@interpreted
def test_responses_of_elsewhere_draft_for_their_own_group_alone(engine, torch_engine):
    here, there, others = (fresh(row, 1300 + row, WILD) for row in range(3))
    wanted = run(torch_engine, [here, there, others])
    # VLLM's embedding would be read beyond its end.
    engine.remember(here.prompt_ids, [[*wanted[0].token_ids[:9], unknown] for unknown in (-1, VOCAB_SIZE)])
    assert scope_of(here.prompt_ids) not in speculator_of(engine).books._rows
    engine.remember(here.prompt_ids, [wanted[0].token_ids])
    before = engine.draft_totals
    # The right tokens, under another group's prompt.
    engine.remember(others.prompt_ids, [wanted[1].token_ids])
    found, steps = counted(engine, [here])
    assert_same(found, {0: wanted[0]})
    assert steps <= len(wanted[0].token_ids) / (1 + DRAFTS) + 3
    # By vLLM's own count.
    counts = engine.draft_totals.since(before)
    assert counts.accepted > 0.7 * counts.drafted > 0
    found, steps_there = counted(engine, [there])
    assert_same(found, {1: wanted[1]})
    assert steps_there > 2 * steps


@interpreted
@pytest.mark.exhaustive
def test_wrong_responses_change_nothing(engine, torch_engine):
    items = [fresh(response, 1400 + response // 4, KINDS[response % 4]) for response in range(ROWS)]
    wanted = run(torch_engine, items)
    for item in items:
        right = wanted[item.response].token_ids
        engine.remember(item.prompt_ids, [[(token + 1) % VOCAB_SIZE for token in right], right[::-1], [], [5] * 999])
    assert_same(run(engine, items), wanted)


@interpreted
@pytest.mark.exhaustive
def test_candidates_are_rows_of_the_own_prompt_whatever_came(engine, monkeypatch):
    """In a history of many groups, with the tokens that stand in the rows as witnesses."""
    speculator = speculator_of(engine)
    propose, looked = speculator.propose, []

    def watched(input_batch, *given, **named):
        drafts = propose(input_batch, *given, **named)
        rows, states = speculator._rows, runner_of(engine).req_states
        for slot in input_batch.idx_mapping.tolist():
            prompt = rows.flying[slot, : int(states.prompt_len.np[slot])]
            for number in [n for n in speculator._candidates[slot].tolist() if n >= 0]:
                row = rows.flying[number] if number < ROWS else rows.ring[number - ROWS]
                # Rows from elsewhere hold the end of the prompt.
                whole, end = torch.equal(row[:12], prompt), torch.equal(row[:LONGEST], prompt[-LONGEST:])
                looked.append(whole or end)
        return drafts

    monkeypatch.setattr(speculator, "propose", watched)
    rnd = random.Random(5)
    short = replace(WILD, max_completion_length=6)
    for number in range(12):
        items = [fresh(response, 1500 + rnd.randrange(5), short) for response in range(rnd.randint(1, ROWS))]
        if number % 3 == 0:
            engine.remember(items[0].prompt_ids, [[7] * 9, [8] * 4])
        run(engine, items)
    assert len(looked) > 500
    assert all(looked)

    monkeypatch.setattr(type(speculator.books), "occupy", _in_one_scope(type(speculator.books).occupy))
    for _ in range(2):
        run(engine, [fresh(response, 1600 + response, short) for response in range(ROWS)])
    assert not all(looked), "a planted fault, all groups in one scope, was not found"


def _in_one_scope(occupy):
    return lambda books, slot, scope: occupy(books, slot, scope if scope == NO_SCOPE else 77)


@interpreted
def test_the_ring_is_bounded_and_forgets_the_oldest():
    from vllm.v1.worker.gpu.states import RequestState  # noqa: PLC0415 - there may be no vLLM

    from tasks.sampling.engines.vllm_siblings import SiblingSpeculator  # noqa: PLC0415

    states = RequestState(4, 32, 64, DRAFTS, VOCAB_SIZE, torch.device("cpu"), use_dense_all_token_ids=True)
    speculator = SiblingSpeculator(states, DRAFTS, ring_bytes=3 * 32 * 4 + 100)
    for number in range(50):
        speculator.remember(5, [[number] * (1 + number)])
        assert speculator._rows.ring.shape == (3, 32)
    assert sorted(speculator._rows.ring[:, 0].tolist()) == [47, 48, 49]
    assert speculator._rows.ring_lengths.tolist() == [32, 32, 32]
    speculator.occupy(2, 5)
    newest_first = [row - 4 for row in speculator.books.candidates[2].tolist() if row >= 4]
    assert speculator._rows.ring[newest_first, 0].tolist() == [49, 48, 47]
    # One row at least, and 64 MiB at most, whatever the context.
    assert SiblingSpeculator(states, DRAFTS, ring_bytes=1)._rows.ring.shape == (1, 32)
    assert SiblingSpeculator(states, DRAFTS)._rows.ring.shape == (4096, 32)


@interpreted
@pytest.mark.exhaustive
def test_in_a_process_of_its_own_nobody_waits_for_the_corpus(pool, tmp_path, model, torch_engine):
    item = fresh(0, 1700, WILD)
    wanted = run(torch_engine, [item])
    engine = pool.make(tmp_path, model, 4, VllmConfig(process="own"))
    engine.remember(item.prompt_ids, [wanted[0].token_ids])
    found, steps = counted(engine, [item])
    assert_same(found, wanted)
    assert steps <= len(wanted[0].token_ids) / (1 + DRAFTS) + 4


@interpreted
@pytest.mark.exhaustive
class TestContract(VllmContract):
    """Of the engines of `pool`."""
