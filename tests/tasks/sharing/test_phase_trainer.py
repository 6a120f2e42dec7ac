"""Phases that one process trains for a run, with the state kept between them, end with the bits of the train task."""

import functools
import threading
import weakref
from dataclasses import replace

import pytest

from storage.clock import SystemClock
from storage.fleet.fleet_records import DueRecord
from storage.records import layout, records
from storage.records.records import TrainingRecord
from storage.records.run import exists, read_plan
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from storage.weights import tensor_sets
from tasks.admitting.fleet_admission import Profile, admit
from tasks.learning.collecting import collect_and_wait
from tasks.learning.restoring import restore_learner
from tasks.sharing import phase_trainer
from tasks.sharing.membership import create_fleet
from tasks.sharing.phase_trainer import PhaseTrainer
from tests.dying_store import DiesAtWrite, Killed
from tests.small_run import (
    EXECUTION,
    commit_iteration,
    config,
    everything,
    learned,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

FLEET, URL, OWN = "memory://fleet", "memory://shared-run", "memory://own"
ITERATIONS = 3
ALGORITHMS = {
    "grpo": {},
    "whole batch": {"algorithm": {"old_logprobs": "trainer", "num_mini_batches": 2}},
    "ppo with a reference": {"algorithm": {"advantage_estimator": "gae", "kl_coef": 0.1}},
    "adapter": {"lora": {"rank": 2}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


def shared_config(model, phase_start=None, **sections):
    """The configuration of a run at URL that is admitted to FLEET. phase_start: more of its section `trainer`."""
    memory_store("fleet")
    create_fleet(FLEET, [URL], 60.0, 1.1, SystemClock())
    trainer = {"placement": "shared", "fleet": FLEET, "group_timeout_s": 600.0} | (phase_start or {})
    settings = config(URL, model, trainer=trainer, **sections)
    admit(settings, model, Profile(phase_s=1.0, cycle_s=5.0), SystemClock())
    return settings


class Collector(threading.Thread):
    """The run's train task, which records and waits while a host trains."""

    def __init__(self, iteration):
        super().__init__()
        self.iteration = iteration
        self.record = self.error = None

    def run(self):
        try:
            self.record = collect_and_wait(URL, self.iteration, EXECUTION, SystemClock())
        except Exception as error:  # noqa: BLE001 - asserted by the test
            self.error = error


def train_on(trainer, iteration):
    collector = Collector(iteration)
    collector.start()
    trainer.train(iteration)
    collector.join(60)
    assert not collector.is_alive()
    assert collector.error is None
    return collector.record


class DiesWhenDue(MemoryStore):
    """Its client is killed as soon as the phase of the first iteration is due."""

    def create(self, key, body):
        created = super().create(key, body)
        if key == layout.due(0):
            raise Killed
        return created


@pytest.mark.slow
@pytest.mark.parametrize(("share", "groups"), [(0.25, 1), (0.3, 2), (0.5, 2), (0.76, 4), (1.0, 4)])
def test_a_phase_is_due_with_the_group_that_completes_its_share_and_not_before(model, share, groups):
    """Of four groups, each of which is recorded by itself."""
    store = memory_store("shared-run", DiesWhenDue("shared-run"))
    plan_iteration(shared_config(model, {"phase_start_share": share, "micro_batch_tokens_max": 1}))
    roll_out(URL, 0)
    with pytest.raises(Killed):
        collect_and_wait(URL, 0, EXECUTION, SystemClock())
    assert len(store.list(layout.batches(0))) == groups
    assert records.read(store, DueRecord, layout.due(0)).groups == groups


def states(store):
    """The tensors of all checkpoints and weights by their digests."""
    found = {}
    for key in store.list(layout.CHECKPOINTS) + store.list(layout.WEIGHTS):
        if key.endswith("/manifest.json"):
            found[key] = tensor_sets.read_manifest(store, key.removesuffix("manifest.json")).tensors
    return found


def sections_of(name):
    return {**ALGORITHMS[name], "retention": {"keep_weights": 9, "keep_checkpoints": 9}}


@functools.cache
def of_the_train_task(model, name):
    """What each iteration of a run of its own has learned, and the states in its store."""
    store, metrics = memory_store("own"), []
    for iteration in range(ITERATIONS):
        plan_iteration(config(OWN, model, **sections_of(name)))
        roll_out(OWN, iteration)
        metrics.append(learned(train_small(OWN, iteration).metrics))
        commit_iteration(OWN, iteration)
    return metrics, states(store)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_iterations_end_with_the_bits_of_the_train_task(model, name):
    expected, expected_states = of_the_train_task(model, name)
    shared = memory_store("shared-run")
    settings = shared_config(model, **sections_of(name))
    said = []
    trainer = None
    for iteration in range(ITERATIONS):
        plan_iteration(settings)
        roll_out(URL, iteration)
        trainer = trainer or PhaseTrainer(URL, SystemClock(), said.append)
        record = train_on(trainer, iteration)
        assert record.metrics.pop("sharing/warm") == float(iteration > 0)
        assert learned(record.metrics) == expected[iteration]
        commit_iteration(URL, iteration)
    assert states(shared) == expected_states
    assert len(expected_states) >= 2 * ITERATIONS + 1
    assert said[-1].phase == "parked"
    assert said[-1].bytes_held > 0
    on_device = [state.phase for state in said if state.iteration == 1]
    assert on_device[0] == "restoring"
    assert on_device[-3:] == ["parking", "publishing", "parked"]


@pytest.mark.slow
def test_a_state_that_another_trainer_has_left_behind_is_not_used(model):
    store = memory_store("shared-run")
    settings = shared_config(model)
    trainer = PhaseTrainer(begun(settings), SystemClock(), lambda _: None)
    train_on(trainer, 0)
    commit_iteration(URL, 0)
    before = everything(store)
    plan_iteration(settings)
    roll_out(URL, 1)
    other = memory_store("shared-run", DiesAtWrite("shared-run", everything(store), 1 << 30))
    # Another host's checkpoint, with another state of the generator.
    key = layout.manifest(layout.checkpoint(1))
    found = tensor_sets.read_manifest(other, layout.checkpoint(1))
    other.delete(key)
    state = found.metadata["trainer_state"] | {
        "optimizer_steps": found.metadata["trainer_state"]["optimizer_steps"] + 1
    }
    tensor_sets.write_manifest(other, layout.checkpoint(1), [found], {"trainer_state": state})
    assert everything(other)[key] != before[key]
    again = PhaseTrainer(URL, SystemClock(), lambda _: None)
    record = train_on(again, 1)
    assert record.metrics["sharing/warm"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("read_ahead", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_state_from_the_store_or_read_ahead_ends_with_the_bits_of_the_train_task(model, name, read_ahead):
    store = memory_store("shared-run")
    settings = shared_config(model, **sections_of(name))
    for iteration in range(ITERATIONS):
        plan_iteration(settings)
        roll_out(URL, iteration)
        said = []
        # A new process each time, as if the one before had made room.
        trainer = PhaseTrainer(URL, SystemClock(), said.append)
        if read_ahead:
            trainer.prefetch(iteration)
            assert [state.phase for state in said] == ["prefetching", "parked"]
            assert not any(state.has_device for state in said)
            assert said[-1].bytes_held > 0
            assert (said[-1].restored.ahead, said[-1].restored.tier) == (True, "object store")
        collector = Collector(iteration)
        collector.start()
        trainer.train(iteration)
        collector.join(60)
        assert collector.error is None
        assert collector.record.metrics["sharing/warm"] == float(read_ahead)
        found = said[-1].restored
        assert (found.ahead, found.tier) == (False, "host memory" if read_ahead else "object store")
        assert found.num_bytes > 0
        commit_iteration(URL, iteration)
    assert states(store) == of_the_train_task(model, name)[1]


@pytest.mark.slow
def test_a_state_on_the_device_that_cannot_be_used_is_dropped_before_another_is_restored(model, monkeypatch):
    """A device with room for one learner would refuse the second."""
    memory_store("shared-run")
    trainer_section = {"placement": "standing", "group_timeout_s": 600.0}
    trainer = PhaseTrainer(begun(config(URL, model, trainer=trainer_section)), SystemClock(), lambda _: None)
    train_on(trainer, 0)
    commit_iteration(URL, 0)
    held, on_device = weakref.ref(trainer._kept.state.learner), []

    def restoring(*given):
        on_device.append(held())
        return restore_learner(*given)

    monkeypatch.setattr(phase_trainer, "restore_learner", restoring)
    plan_iteration(config(URL, model, trainer=trainer_section | {"group_timeout_s": 601.0}))
    roll_out(URL, 1)
    assert train_on(trainer, 1).metrics["sharing/warm"] == 0.0
    assert on_device == [None]


@pytest.mark.slow
def test_a_trainer_that_lost_its_state_has_stood_since_its_last_phase_only(model):
    memory_store("shared-run")
    settings = config(URL, model, trainer={"placement": "standing", "group_timeout_s": 600.0})
    trainer = PhaseTrainer(begun(settings), SystemClock(), lambda _: None)
    trainer._free_since_s -= 1e6
    assert train_on(trainer, 0).metrics["timing_s/stood"] > 1e6 - 1
    commit_iteration(URL, 0)
    plan_iteration(settings)
    roll_out(URL, 1)
    trainer._kept = None
    assert train_on(trainer, 1).metrics["timing_s/stood"] < 600


@pytest.mark.slow
def test_a_damaged_checkpoint_is_an_error(model):
    store = memory_store("shared-run")
    settings = shared_config(model)
    train_on(PhaseTrainer(begun(settings), SystemClock(), lambda _: None), 0)
    commit_iteration(URL, 0)
    plan_iteration(settings)
    roll_out(URL, 1)
    key = next(key for key in store.list(layout.checkpoint(1)) if key.endswith(".safetensors"))
    body = store.get(key)
    store.put(key, body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(CorruptObject, match=key):
        PhaseTrainer(URL, SystemClock(), lambda _: None).train(1)


def begun(settings):
    plan_iteration(settings)
    roll_out(URL, 0)
    return URL


@pytest.mark.slow
def test_killed_at_any_write_the_next_worker_ends_with_the_same_bits(model):
    """Also between the weights, with which the run goes on, and their checkpoint: then the next phase replays."""
    memory_store("shared-run")
    settings = shared_config(model)
    plan_iteration(settings)
    roll_out(URL, 0)
    at = everything(memory_store_of("shared-run"))
    undisturbed = memory_store("shared-run", DiesAtWrite("shared-run", at, 1 << 30))
    train_on(PhaseTrainer(URL, SystemClock(), lambda _: None), 0)
    recorded = {key: body for key, body in everything(undisturbed).items() if not is_of_phase(key)}
    written = len(everything(undisturbed)) - len(recorded)
    replayed = []

    def next_phase(writes):
        """The store after two phases, of which the first one's worker is killed at a write."""
        store = memory_store("shared-run", DiesAtWrite("shared-run", recorded, writes))
        if writes < written:
            with pytest.raises(Killed):
                PhaseTrainer(URL, SystemClock(), lambda _: None).train(0)
        store.left = 1 << 30
        PhaseTrainer(URL, SystemClock(), lambda _: None).train(0)
        assert records.read(store, TrainingRecord, layout.training(0)).weight_version == 1
        commit_iteration(URL, 0)
        plan_iteration(settings)
        roll_out(URL, 1)
        record = train_on(PhaseTrainer(URL, SystemClock(), lambda _: None), 1)
        replayed.append(record.metrics.get("replay/iterations", 0.0))
        return states(store)

    expected = next_phase(1 << 30)
    for writes in range(written):
        found = next_phase(writes)
        lacks = {layout.manifest(layout.checkpoint(1))} if replayed[-1] else set()
        assert found == {key: state for key, state in expected.items() if key not in lacks}
    assert set(replayed) == {0.0, 1.0}


@pytest.mark.slow
def test_the_process_that_trains_never_grades(model, tmp_path):
    memory_store("shared-run")
    noted = tmp_path / "graded"
    reward = {"function": "tests.reward_functions:noting", "arguments": {"file": str(noted)}}
    train_on(PhaseTrainer(begun(shared_config(model, rewards=[reward])), SystemClock(), lambda _: None), 0)
    tried = 2  # responses of the plan's own, which calls the function once
    assert len(noted.read_text().splitlines()) == tried + read_plan(memory_store_of("shared-run"), 0).num_responses


def memory_store_of(name):
    from storage.stores.connect import connect  # noqa: PLC0415

    return connect(f"memory://{name}")


def is_of_phase(key):
    """Whether the worker has written it."""
    return key.startswith((layout.checkpoint(1), layout.weights(1))) or key == layout.training(0)


@pytest.mark.slow
def test_a_published_phase_is_not_trained_again(model):
    store = memory_store("shared-run")
    settings = shared_config(model)
    plan_iteration(settings)
    roll_out(URL, 0)
    trainer = PhaseTrainer(URL, SystemClock(), lambda _: None)
    train_on(trainer, 0)
    before = everything(store)
    trainer.train(0)
    PhaseTrainer(URL, SystemClock(), lambda _: None).train(0)
    assert everything(store) == before
    assert exists(store, layout.due(0))
    assert replace(config(URL, model)).run.url == URL
