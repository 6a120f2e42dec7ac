"""A member of the crew from nothing but a run's url and its slot."""

import threading
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from storage.clock import ManualClock, SystemClock
from storage.journal.assembly import JournalReader
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import ClosedRecord
from storage.records.run import read_plan
from storage.stores.memory import MemoryStore
from storage.stores.metered import metered, requests_of
from storage.stores.store import CorruptObject, ObjectMissing
from tasks.device.gpu_check import WrongGpus
from tasks.sampling.engines.choose import build_engine
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.session.actions import HeartbeatState
from tasks.sampling.session.member import generate_slot, session_config
from tasks.sampling.session.performer import HeartbeatWriter
from tasks.sampling.session.session_outcome import Preempted
from tests.processes import wait_until
from tests.small_run import config, everything, memory_store, model_directory, plan_iteration, roll_out

pytestmark = pytest.mark.slow

URL = "memory://member"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store(model):
    """A run whose first iteration is planned."""
    store = memory_store("member")
    plan_iteration(config(URL, model))
    return store


def generate(slot, notice=lambda: False, **more):
    return generate_slot(URL, 0, slot, notice, SystemClock(), **more)


def responses(store):
    plan = read_plan(store, 0)
    reader = JournalReader(store, plan)
    reader.refresh()
    return [reader.assemble(response) for response in range(plan.num_responses)]


def told_at_step(step):
    """A notice that comes before the step of that number."""
    calls = iter(range(1000))
    return lambda: next(calls) == step


def test_all_slots_together_end_every_response(store):
    outcomes = [generate(slot) for slot in (0, 1)]
    assembled = responses(store)
    assert all(response.finish.ends_response for response in assembled)
    assert [outcome.responses_finished for outcome in outcomes] == [6, 6]
    assert sum(outcome.tokens_generated for outcome in outcomes) == sum(len(r.token_ids) for r in assembled)
    assert {outcome.tokens_recovered for outcome in outcomes} == {0}


def test_a_member_that_comes_again_finds_its_work_done(store):
    first = generate(0)

    def build(*_):
        pytest.fail("weights are loaded for nothing")

    class NoWeights:
        def __init__(self, *given):
            self._engine = build_engine(*given)

        def __getattr__(self, name):
            return build if name in ("load_weights", "start", "step") else getattr(self._engine, name)

    again = generate(0, build=NoWeights)
    assert (again.tokens_generated, again.tokens_recovered) == (0, first.tokens_generated)


def test_a_notice_hands_over_and_the_next_goes_on_at_that_token(store):
    with pytest.raises(Preempted):
        generate(0, notice=told_at_step(7))
    before = [r.token_ids.tolist() for r in responses(store)]
    kept = sum(len(tokens) for tokens in before)
    assert kept > 0
    outcome = generate(0)
    assert outcome.tokens_recovered == kept
    after = responses(store)
    assert all(r.token_ids[: len(tokens)].tolist() == tokens for r, tokens in zip(after, before, strict=True))


def test_the_weights_are_those_that_the_plan_names(store):
    loaded = []

    class Remembering:
        def __init__(self, *given):
            self._engine = build_engine(*given)

        def load_weights(self, version, tensors):
            loaded.append((version, set(tensors)))
            self._engine.load_weights(version, tensors)

        def __getattr__(self, name):
            return getattr(self._engine, name)

    generate(1, build=Remembering)
    [(version, names)] = loaded
    assert version == 0
    assert "model.embed_tokens.weight" in names


@pytest.mark.slow
def test_a_real_engine_resumes_to_the_very_tokens_of_an_undisturbed_one(model):
    """float32 on a CPU: identical."""
    torch_engine = {"engine": "torch", "device": "cpu", "max_responses_in_flight": 4}
    results = []
    for steps in ((5, 30), ()):
        store = memory_store("member")
        plan_iteration(config(URL, model, rollout=torch_engine))
        for step in steps:
            with pytest.raises(Preempted):
                generate(0, notice=told_at_step(step))
        assert bool(steps) == (0 < sum(len(response.token_ids) for response in responses(store)) < 240)
        roll_out(URL, 0)
        results.append(responses(store))
    for left, right in zip(*results, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
        assert np.abs(left.logprobs - right.logprobs).max() < 1e-4
    assert len({tuple(response.token_ids) for response in results[0]}) > 6


def damage(store, part):
    """Flip a byte in the middle of the first object whose key contains `part`; its key."""
    key = next(key for key in store.list("") if part in key)
    body = bytearray(store.get(key))
    body[len(body) // 2] ^= 0x20
    store.put(key, bytes(body))
    return key


@pytest.mark.parametrize("part", ["plan.json", "prompts-", "weights/00000000/manifest", ".safetensors"])
def test_what_is_damaged_is_named_and_nothing_is_generated_from_it(store, part):
    key = damage(store, part)
    if part == "plan.json":
        store.put(key, store.get(key)[:-30])
    with pytest.raises(CorruptObject) as caught:
        generate(0)
    assert caught.value.key == key
    assert store.list(layout.journal(0)) == []


def test_a_damaged_shard_is_named_and_not_continued(store):
    with pytest.raises(Preempted):
        generate(0, notice=told_at_step(7))
    key = damage(store, "/journal/")
    before = everything(store)
    with pytest.raises(CorruptObject) as caught:
        generate(0)
    assert caught.value.key == key
    changed = {k for k, body in everything(store).items() if before.get(k) != body}
    assert all("/alive/" in k for k in changed)


def test_an_engine_that_fails_is_closed_and_says_why(store):
    closed = []

    class Broken:
        def __init__(self, *given):
            self._engine = build_engine(*given)

        def step(self):
            raise EngineError("out of memory")

        def close(self):
            closed.append(True)

        def __getattr__(self, name):
            return getattr(self._engine, name)

    with pytest.raises(EngineError, match="out of memory"):
        generate(0, build=Broken)
    assert closed == [True]
    assert generate(0).responses_finished == 6


def test_what_retention_has_deleted_is_no_error_once_the_iteration_is_closed(store):
    class Late:
        """Its weights come when the iteration is long over."""

        def __init__(self, *given):
            self._engine = build_engine(*given)

        def load_weights(self, version, tensors):
            raise ObjectMissing("weights/00000000/manifest.json")

        def __getattr__(self, name):
            return getattr(self._engine, name)

    with pytest.raises(ObjectMissing):
        generate(0, build=Late)
    records.commit(store, layout.closed(0), ClosedRecord(iteration=0, reason="trained"))
    told = iter([False])
    get = store.get

    def closed_later(key, start=0, end=None):
        if key == layout.closed(0) and not next(told, True):
            raise ObjectMissing(key)
        return get(key, start, end)

    store.get = closed_later
    assert generate(0, build=Late).tokens_generated == 0


def test_a_notice_is_heeded_while_weights_are_pulled(store):
    """The session is told before the engine has any weights, and hands everything over."""
    told = []

    def notice():
        return bool(told)

    class Noticing:
        def __init__(self, *given):
            self._engine = build_engine(*given)

        def load_weights(self, version, tensors):
            pytest.fail("it was told to leave before")

        def __getattr__(self, name):
            return getattr(self._engine, name)

    get = store.get

    def get_slowly(key, start=0, end=None):
        if key.endswith(".safetensors"):
            # They are pulled while the engine is built. The notice comes when the session waits for them.
            wait_until(lambda: store.list(layout.alive_all(0)))
            told.append(key)
        return get(key, start, end)

    store.get = get_slowly
    with pytest.raises(Preempted):
        generate(0, notice=notice, build=Noticing)
    assert told
    [key] = store.list(layout.alive_all(0))
    assert records.read(store, HeartbeatRecord, key).state == "gone"


def test_a_member_tells_what_it_took(store):
    def slow(_rollout, _model, vocab_size):
        return ScriptedEngine(vocab_size, 4, clock=SystemClock(), step_time_s=lambda batch: 0.001 + 0.0001 * batch)

    outcome = generate(0, build=slow)
    told = records.read(store, HeartbeatRecord, layout.alive(0, outcome.incarnation))
    assert told.started_at_s <= told.working_at_s <= told.updated_at_s
    assert 0.001 * told.tokens_generated / 4 <= told.decode_s <= told.updated_at_s - told.working_at_s
    assert {batch for batch, _ in told.step_s} <= {1, 2, 3, 4}
    assert all(step_s >= 0.001 for _, step_s in told.step_s)
    assert told.step_s
    # It is gone, and would begin nothing more.
    assert (told.state, told.room) == ("gone", 0)
    # Its shard, heartbeats and claim; its model, prompts, plan and weights.
    assert told.puts >= 4
    assert told.gets >= 10
    read = [key for key in store.list("") if key.startswith((layout.MODEL, layout.weights(0)))]
    assert told.bytes_read > sum(len(store.get(key)) for key in read)


def test_a_later_session_of_a_process_counts_only_its_own_requests(model):
    store, clock = metered(MemoryStore("counted")), ManualClock()
    store.put("earlier", bytes(7))
    assert len(store.get("earlier")) == 7
    settings = session_config(config(URL, model), slot=0, pool="rollout")
    later = replace(settings, requests_before=requests_of(store))
    assert len(store.get("earlier")) == 7
    told = {"state": "working", "working_at_s": None, "decode_s": 0.0, "step_s": ()}
    state = HeartbeatState(**{**dict.fromkeys((each.name for each in fields(HeartbeatState)), 0), **told})
    for name, its_own in (("first", settings), ("later", later)):
        HeartbeatWriter(store, 0, name, ScriptedEngine(9, 1), its_own, clock).beat(state)
    first, second = (records.read(store, HeartbeatRecord, layout.alive(0, name)) for name in ("first", "later"))
    assert (first.puts, first.gets, first.bytes_read) == (1, 2, 14)
    assert (second.puts, second.gets, second.bytes_read) == (1, 1, 7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_on_a_gpu_pool_whose_machine_has_no_gpu_it_refuses_to_compute_on_the_cpu(model):
    memory_store("member")
    on_gpus = {"pools": {"rollout": {"gpus": 1}}}
    plan_iteration(config(URL, model, rollout={"engine": "torch"}, **on_gpus))
    with pytest.raises(WrongGpus, match=r"pools\.rollout\.gpus: value 1, and torch sees no GPU \(driver "):
        generate(0)
    memory_store("member")
    plan_iteration(config(URL, model, rollout={"engine": "torch", "device": "cpu"}, **on_gpus))
    assert generate(0).tokens_generated


def test_weights_are_pulled_while_the_engine_is_built(store):
    with_weights = threading.Event()

    class Watched(MemoryStore):
        def get(self, key, start=0, end=None):
            if key.startswith(layout.weights(0)):
                with_weights.set()
            return super().get(key, start, end)

    watched = Watched("member")
    for key, body in everything(store).items():
        watched.create(key, body)
    memory_store("member", watched)

    def build(*given):
        # Were they pulled after the engine is built, this would wait in vain.
        assert with_weights.wait(60)
        return build_engine(*given)

    assert generate(0, build=build).tokens_generated
