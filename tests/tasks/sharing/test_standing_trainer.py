"""The fleet of a run whose own trainer stands: what its plan makes of it, and when its host is no longer needed."""

import pytest

from storage.clock import ManualClock
from storage.fleet import fleet_layout
from storage.fleet.fleet_reading import read_allowed_run
from storage.fleet.fleet_records import FleetRecord
from storage.records import layout, records
from storage.records.run import acquire_lease, release_lease
from storage.stores.connect import connect
from storage.stores.store import StoreUnavailable
from tasks.admitting.fleet_admission import Profile, admit
from tasks.sharing.membership import admit_alone, check_admitted, create_fleet, leave
from tasks.sharing.standing_trainer import LEASE_LOOKS, LOOK_INTERVAL_S, ExecutionEnd
from tests.small_run import Unreachable, config, everything, memory_store, plan_iteration

URL, EXECUTION = "memory://standing-run", "test"
STANDING = {"placement": "standing"}


@pytest.fixture
def store():
    return memory_store("standing-run")


def found(url=URL):
    """The run that the host of its fleet would serve."""
    fleet = connect(fleet_layout.standing(url))
    rules = records.read(fleet, FleetRecord, fleet_layout.FLEET)
    return read_allowed_run(fleet, rules, fleet_layout.run_id(url))


def test_a_plan_admits_the_run_to_a_fleet_of_its_own_once(store, model):
    settings = config(URL, model, trainer=STANDING)
    plan_iteration(settings)
    assert (found().run_url, found().ranks) == (URL, 1)
    assert set(store.list("standing/")) == {"standing/fleet.json", f"standing/runs/{found().id}/run.json"}
    before = everything(store)
    admit_alone(settings, ManualClock(77.0))
    plan_iteration(settings)
    of_fleet = {key: body for key, body in before.items() if key.startswith("standing/")}
    assert {key: store.get(key) for key in store.list("standing/")} == of_fleet


def test_a_run_with_another_placement_has_none(store, model):
    admit_alone(config(URL, model), ManualClock())
    assert store.list("standing/") == []


def test_the_number_of_ranks_may_change_with_the_next_execution(store, model):
    for ranks in (1, 2):
        admit_alone(config(URL, model, trainer=STANDING | {"nproc_per_node": ranks}), ManualClock())
        assert found().ranks == ranks


def test_a_run_that_was_copied_is_served_at_its_new_place(store, model):
    admit_alone(config(URL, model, trainer=STANDING), ManualClock())
    there = memory_store("copied-run")
    for key, body in everything(store).items():
        there.put(key, body)
    admit_alone(config("memory://copied-run", model, trainer=STANDING), ManualClock())
    assert found("memory://copied-run").run_url == "memory://copied-run"


def test_a_run_that_another_fleet_has_admitted_is_refused_until_it_has_left(store, model):
    """Both hosts would train each of its phases."""
    memory_store("left-fleet")
    create_fleet("memory://left-fleet", [URL], 60.0, 1.1, ManualClock())
    shared = config(URL, model, trainer={"placement": "shared", "fleet": "memory://left-fleet"})
    admit(shared, model, Profile(phase_s=1.0, cycle_s=5.0), ManualClock())
    plan_iteration(shared)
    alone = config(URL, model, trainer=STANDING)
    said = (
        r"^trainer.placement: value 'standing'; allowed: shared with trainer.fleet 'memory://left-fleet', to which "
        "memory://standing-run belongs"
    )
    with pytest.raises(ValueError, match=said):
        check_admitted(alone)
    leave("memory://left-fleet", URL, "it stands", ManualClock())
    check_admitted(alone)
    plan_iteration(alone)


def looks(end, clock, count):
    """What so many looks find."""
    answers = []
    for _ in range(count):
        clock.advance(LOOK_INTERVAL_S)
        answers.append(end.has_come())
    return answers


def test_it_is_needed_until_the_last_weights_are_published(store):
    clock = ManualClock()
    acquire_lease(store, EXECUTION, 60.0, clock)
    end = ExecutionEnd(store, EXECUTION, 3, clock)
    store.put(layout.manifest(layout.weights(3)), b"of the last iteration but one")
    assert not any(looks(end, clock, 2 * LEASE_LOOKS))
    store.put(layout.manifest(layout.weights(4)), b"of the last one")
    assert looks(end, clock, 2) == [True, True]
    # It stays so: the next execution deletes what is old.
    store.delete(layout.manifest(layout.weights(4)))
    assert end.has_come()


@pytest.mark.parametrize("successor", [None, "another"])
def test_it_is_not_needed_where_its_execution_advances_the_run_no_more(store, successor):
    clock = ManualClock()
    acquire_lease(store, EXECUTION, 60.0, clock)
    end = ExecutionEnd(store, EXECUTION, 3, clock)
    assert not any(looks(end, clock, LEASE_LOOKS))
    release_lease(store, EXECUTION)
    if successor is not None:
        acquire_lease(store, successor, 60.0, clock)
    assert any(looks(end, clock, LEASE_LOOKS))


def test_a_store_that_does_not_answer_ends_nothing(caplog):
    clock, silent = ManualClock(), Unreachable()
    with pytest.raises(StoreUnavailable):
        silent.get("run.json")
    assert not any(looks(ExecutionEnd(silent, EXECUTION, 0, clock), clock, 3))
    assert "whether the execution has ended cannot be seen: no answer" in caplog.text
