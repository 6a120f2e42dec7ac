"""Phases of a run that stores a checkpoint only now and then: a kept state is used, and a lost one is replayed."""

import pytest

from storage.clock import SystemClock
from storage.records import layout
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.weights.stored_versions import list_versions
from tasks.admitting.fleet_admission import Profile, admit
from tasks.sharing.membership import create_fleet
from tasks.sharing.phase_trainer import PhaseTrainer
from tests.small_run import (
    commit_iteration,
    config,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)
from tests.tasks.sharing.test_phase_trainer import FLEET, OWN, URL, states, train_on

pytestmark = pytest.mark.slow

ITERATIONS = 4
SECTIONS = {"algorithm": {"advantage_estimator": "gae", "kl_coef": 0.1}, "retention": {"keep_weights": 9}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model):
    """All states of a run of its own that stores each."""
    store = memory_store("own")
    for iteration in range(ITERATIONS):
        plan_iteration(config(OWN, model, **SECTIONS))
        roll_out(OWN, iteration)
        train_small(OWN, iteration)
        commit_iteration(OWN, iteration)
    return states(store)


def shared_config(model, interval):
    memory_store("fleet")
    create_fleet(FLEET, [URL], 60.0, 1.1, SystemClock())
    trainer = {"placement": "shared", "fleet": FLEET, "group_timeout_s": 600.0, "checkpoint_interval": interval}
    settings = config(URL, model, trainer=trainer, **SECTIONS)
    admit(settings, model, Profile(phase_s=1.0, cycle_s=5.0), SystemClock())
    return settings


def test_a_state_that_is_kept_needs_neither_checkpoint_nor_replay(model, expected):
    store, said = memory_store("shared-run"), []
    settings = shared_config(model, 3)
    trainer = None
    for iteration in range(ITERATIONS):
        plan_iteration(settings)
        roll_out(URL, iteration)
        trainer = trainer or PhaseTrainer(URL, SystemClock(), said.append)
        metrics = train_on(trainer, iteration).metrics
        assert metrics["sharing/warm"] == float(iteration > 0)
        assert "replay/iterations" not in metrics
        commit_iteration(URL, iteration)
    assert list_versions(store, layout.CHECKPOINTS).complete == {3}
    found = states(store)
    assert found == {key: expected[key] for key in found}
    assert {state.replays for state in said} == {0}


def test_a_state_that_is_kept_is_not_used_for_a_version_that_another_host_has_trained(model, expected):
    store = memory_store("shared-run")
    settings = shared_config(model, 9)
    first = None
    for iteration in range(3):
        plan_iteration(settings)
        roll_out(URL, iteration)
        first = first or PhaseTrainer(URL, SystemClock(), lambda _: None)
        trainer = PhaseTrainer(URL, SystemClock(), lambda _: None) if iteration == 1 else first
        metrics = train_on(trainer, iteration).metrics
        assert (metrics["sharing/warm"], metrics.get("replay/iterations", 0.0)) == (0.0, float(iteration))
        commit_iteration(URL, iteration)
    found = states(store)
    assert found == {key: expected[key] for key in found}


@pytest.mark.parametrize("read_ahead", [False, True])
def test_a_new_process_replays_what_the_checkpoint_lacks(model, expected, read_ahead):
    store = memory_store("shared-run")
    settings = shared_config(model, 3)
    for iteration in range(ITERATIONS):
        plan_iteration(settings)
        roll_out(URL, iteration)
        said = []
        trainer = PhaseTrainer(URL, SystemClock(), said.append)
        if read_ahead:
            trainer.prefetch(iteration)
        metrics = train_on(trainer, iteration).metrics
        replays = iteration % 3
        assert metrics["sharing/warm"] == float(read_ahead)
        assert metrics.get("replay/iterations", 0.0) == replays
        # The host gives such a phase more time before it kills it.
        assert said[-1].replays == replays
        phases = [state.phase for state in said]
        assert ("replaying" in phases) == (replays > 0)
        assert all(state.has_device for state in said if state.phase == "replaying")
        commit_iteration(URL, iteration)
    found = states(store)
    assert found == {key: expected[key] for key in found}
    assert layout.manifest(layout.checkpoint(2)) not in found


class Overtaken(MemoryStore):
    """Another host publishes its weights, with other bits, just before ours."""

    def __init__(self, theirs):
        super().__init__("shared-run")
        self._theirs = theirs

    def create(self, key, body):
        if key == layout.manifest(layout.weights(1)):
            self._objects.update(self._theirs)
        return super().create(key, body)


def test_a_state_whose_weights_another_host_has_published_with_other_bits_is_dropped(model):
    memory_store("own")
    plan_iteration(config(OWN, model, **SECTIONS, optimizer={"learning_rate": 9e-3}))
    roll_out(OWN, 0)
    train_small(OWN, 0)
    own = connect(OWN)
    theirs = {key: own.get(key) for key in own.list(layout.weights(1))}
    store = memory_store("shared-run", Overtaken(theirs))
    settings = shared_config(model, 9)
    said = []
    trainer = None
    for iteration in range(2):
        plan_iteration(settings)
        roll_out(URL, iteration)
        trainer = trainer or PhaseTrainer(URL, SystemClock(), said.append)
        metrics = train_on(trainer, iteration).metrics
        commit_iteration(URL, iteration)
        if iteration == 0:
            assert (said[-1].phase, said[-1].digest) == ("parked", None)
    assert states(store)[layout.manifest(layout.weights(1))] == states(own)[layout.manifest(layout.weights(1))]
    # What is replayed has other bits than what the other host published, and that is told.
    assert (metrics["sharing/warm"], metrics["replay/iterations"]) == (0.0, 1.0)
    assert metrics["replay/tensors_changed"] > 0
