"""Admission beside living hosts, whose heartbeats change while the command watches."""

from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import AdmittedRun, FleetRecord, LeftRecord, Prediction, WaitingRun
from storage.fleet.seats import newest_seat, take_seat
from storage.package_version import VERSION
from storage.records import layout, records
from storage.records.records import ReportRecord, RunRecord
from storage.stores.connect import connect
from tasks.admitting.fleet_admission import (
    MustWaitError,
    Profile,
    admit,
    admit_at_last,
    expected_state_bytes,
    host_name,
)
from tasks.sharing.membership import check_admitted, leave
from tasks.sharing.seating import Seating
from tests.fleet_records import TTL_S, BeatingClock, a_beat, a_host, a_run
from tests.small_run import config, memory_store, plan_iteration

FLEET, URL = "memory://admitting", "memory://admitted/run"
PROFILE = Profile(phase_s=60.0, cycle_s=300.0)
FLEET_OF_ALL = FleetRecord(run_prefixes=("memory://admitted", "memory://runs"), host_ttl_s=TTL_S, created_at_s=0.0)


@pytest.fixture
def settings(model):
    return config(URL, model, trainer={"placement": "shared", "fleet": FLEET})


@pytest.fixture
def store():
    made = memory_store("admitting")
    rules = FleetRecord(run_prefixes=("memory://admitted",), host_ttl_s=TTL_S, created_at_s=0.0)
    records.put(made, fleet_layout.FLEET, rules)
    return made


def announce(store, name, memory_bytes, devices=1):
    records.put(store, fleet_layout.host(name), a_host(name, memory_bytes, devices=devices))
    records.put(store, fleet_layout.alive(name), a_beat(name, 0))


def test_a_run_is_admitted_for_a_host_that_lives(store, settings, model):
    announce(store, "silent", 1 << 40)
    announce(store, "alive", 1 << 40)
    admission = admit(settings, model, PROFILE, BeatingClock(store, {"alive": "idle"}))
    assert [host_name(admission, choice) for choice in admission.choices] == ["a-machine (alive)"]
    assert fleet_layout.admitted(admission.run.id) in store.list("")


def test_the_prediction_is_stored_and_decides_on_which_host_the_run_trains(store, settings, model):
    """Placement alone would choose "a", whose name is first."""
    announce(store, "a", 1 << 40)
    announce(store, "z", 1 << 40)
    other = a_run("other", phase_s=50.0, cycle_s=300.0)
    records.put(store, fleet_layout.admitted(other.id), other)
    records.put(store, fleet_layout.FLEET, FLEET_OF_ALL)
    take_seat(store, other.id, 0, "a")
    clock = BeatingClock(store, {"a": "idle", "z": "idle"})
    admission = admit(settings, model, PROFILE, clock)
    stored = records.read(store, AdmittedRun, fleet_layout.admitted(admission.run.id))
    assert stored.predicted == Prediction(host="z", slowdowns={stored.id: pytest.approx(1.0)})
    records.put(store, fleet_layout.left(other.id), LeftRecord(id=other.id, reason="over", left_at_s=0.0))
    for name in ("a", "z"):
        Seating(store, FLEET_OF_ALL, a_host(name, 1 << 40), ManualClock(0.0)).look()
    assert newest_seat(store, stored.id).host == "z"


def test_a_state_that_no_host_can_hold_is_refused_for_good_and_by_name(store, settings, model):
    announce(store, "small", 10)
    announce(store, "smaller", 5)
    clock = BeatingClock(store, {"small": "idle", "smaller": "idle"})
    with pytest.raises(
        ValueError, match=r"policy.path: value with a state of .* GiB in .*; allowed in this fleet"
    ) as refused:
        admit(settings, model, PROFILE, clock)
    assert not isinstance(refused.value, MustWaitError)
    assert store.list(fleet_layout.RUNS) == []


def test_ranks_for_which_no_host_has_devices_are_refused_by_name(store, settings, model):
    announce(store, "one", 1 << 40)
    announce(store, "four", 1 << 40, devices=4)
    clock = BeatingClock(store, {"one": "idle", "four": "idle"})
    two = config(URL, model, trainer={"placement": "shared", "fleet": FLEET, "nproc_per_node": 2})
    with pytest.raises(ValueError, match=rf"^trainer.nproc_per_node: value 2 in {URL}; allowed in this fleet: 1 or 4,"):
        admit(two, model, PROFILE, clock)
    assert fleet_layout.admitted(fleet_layout.run_id(URL)) not in store.list("")
    announce(store, "two", 1 << 40, devices=2)
    beating = BeatingClock(store, {"one": "idle", "two": "idle", "four": "idle"})
    admission = admit(two, model, PROFILE, beating)
    assert [choice.host for choice in admission.choices] == ["two"]
    assert (admission.run.ranks, admission.run.predicted.host) == (2, "two")
    check_admitted(two)
    # The number of ranks is an operational setting, which may change from one iteration to the next; not in a fleet.
    with pytest.raises(ValueError, match=rf"^trainer.nproc_per_node: value 1; allowed: 2, with which {FLEET} has"):
        check_admitted(settings)


def test_a_state_beside_which_others_take_the_memory_has_to_wait(store, settings, model):
    needed = expected_state_bytes(settings, model)
    announce(store, "full", needed)
    other = a_run("other", state_bytes=1)
    records.put(store, fleet_layout.FLEET, FLEET_OF_ALL)
    records.put(store, fleet_layout.admitted(other.id), other)
    take_seat(store, other.id, 0, "full")
    with pytest.raises(MustWaitError, match=r"no host's memory holds .* GiB beside the states of its runs"):
        admit(settings, model, PROFILE, BeatingClock(store, {"full": "idle"}))


class Leaving(BeatingClock):
    """After so many seconds the run leaves."""

    def __init__(self, store, run, after_s):
        super().__init__(store, {})
        self.run, self.until_s = run, self.monotonic() + after_s

    def sleep(self, duration_s):
        super().sleep(duration_s)
        if self.monotonic() >= self.until_s:
            left = LeftRecord(id=self.run.id, reason="over", left_at_s=0.0)
            records.put(self.store, fleet_layout.left(self.run.id), left)


def heavy(name):
    return a_run(name, phase_s=290.0, cycle_s=300.0)


def test_a_run_that_waits_is_admitted_when_there_is_room_and_says_once_why_it_waits(store, settings, model):
    records.put(store, fleet_layout.FLEET, FLEET_OF_ALL)
    records.put(store, fleet_layout.admitted(heavy("x").id), heavy("x"))
    clock, told = Leaving(store, heavy("x"), 100.0), []
    began_s = clock.monotonic()
    admission = admit_at_last(settings, model, PROFILE, clock, told.append)
    assert 100.0 <= clock.monotonic() - began_s < 100.0 + TTL_S
    assert [line.split(":")[0] for line in told] == ["memory"]
    assert "cycles would take longer than alone" in told[0]
    assert fleet_layout.admitted(admission.run.id) in store.list("")
    [waited] = [records.read(store, WaitingRun, key) for key in store.list(fleet_layout.WAITING)]
    assert (waited.state, waited.run_url) == ("gone", URL)
    assert waited.waited_s >= 100.0


class Beside(BeatingClock):
    """Another process waits meanwhile; this one sees it beat."""

    def __init__(self, store, waited_s):
        super().__init__(store, {})
        self.waited_s = waited_s
        self.beat()

    def beat(self):
        waiting = WaitingRun(
            incarnation="w",
            sequence=self.beats,
            run_url="memory://admitted/z-large",
            waited_s=self.waited_s,
            state="waiting",
        )
        records.put(self.store, fleet_layout.waiting("w"), waiting)

    def sleep(self, duration_s):
        super().sleep(duration_s)
        self.waited_s += duration_s
        self.beat()


def test_a_run_that_fits_passes_one_that_waits_but_only_for_as_long_as_the_fleet_is_patient(store, settings, model):
    records.put(store, fleet_layout.FLEET, FLEET_OF_ALL)
    patience_s = FLEET_OF_ALL.patience_s
    with pytest.raises(
        MustWaitError, match=r"memory://admitted/z-large waits for longer than the fleet's patience_s, 3600 s"
    ):
        admit(settings, model, PROFILE, Beside(store, patience_s))
    assert store.list(fleet_layout.RUNS) == []
    clock = Beside(store, patience_s - 100.0)
    clock.sleep(1.0)
    assert admit(settings, model, PROFILE, clock).run.run_url == URL


def test_what_is_not_given_is_the_median_of_the_runs_reports(store, settings, model):
    memory_store("admitted")
    run = connect(URL)
    records.put(
        run,
        layout.RUN,
        RunRecord(config={}, digest="0" * 64, vocab_size=9, model_files={}, created_at_s=0.0),
    )
    for iteration, created_at_s in enumerate((100.0, 300.0, 510.0)):
        report = ReportRecord(
            iteration=iteration,
            weight_version=iteration + 1,
            next_prompt=0,
            metrics={"timing_s/iteration": 390.0, "timing_s/compute": 20.0 + iteration},
            rewards=(),
            lengths=(),
            lives=(),
            train_started_at_s=0.0,
            train_ended_at_s=0.0,
            created_at_s=created_at_s,
        )
        records.put(run, layout.report(iteration), report)
    admitted = admit(settings, model, Profile(), BeatingClock(store, {})).run
    assert (admitted.phase_s, admitted.cycle_s) == (21.0, 205.0)
    given = admit(settings, model, Profile(phase_s=5.0), BeatingClock(store, {}), dry_run=True).run
    assert given == admitted


def test_a_run_whose_host_is_of_another_version_is_refused_by_name_until_that_host_has_ended(store, settings, model):
    announce(store, "new", 1 << 40)
    run = admit(settings, model, PROFILE, BeatingClock(store, {"new": "idle"})).run
    check_admitted(settings)
    records.put(store, fleet_layout.host("old"), replace(a_host("old"), version="0.0.9"))
    records.put(store, fleet_layout.alive("old"), a_beat("old", 0))
    assert take_seat(store, run.id, 0, "old")
    said = (
        rf"^trainer.fleet: value '{FLEET}', whose host a-machine \(old\) has Gleaner 0.0.9, the run {VERSION}; allowed"
    )
    with pytest.raises(ValueError, match=said):
        check_admitted(settings)
    records.put(store, fleet_layout.alive("old"), a_beat("old", 1, "gone"))
    check_admitted(settings)
    assert take_seat(store, run.id, 1, "new")
    check_admitted(settings)


def test_a_run_that_another_fleet_has_is_refused_until_it_has_left_that(store, settings, model):
    """Two fleets would both train each of its phases."""
    memory_store("admitted")
    admit(settings, model, PROFILE, ManualClock())
    plan_iteration(settings)
    second = memory_store("second")
    records.put(second, fleet_layout.FLEET, FLEET_OF_ALL)
    moved = config(URL, model, trainer={"placement": "shared", "fleet": "memory://second"})
    said = rf"trainer\.fleet: value 'memory://second'; allowed: '{FLEET}', to which {URL} belongs; take it out"
    with pytest.raises(ValueError, match=said):
        admit(moved, model, PROFILE, ManualClock())
    assert list(second.list("")) == [fleet_layout.FLEET]
    # Nor is it planned, if it was admitted there while it had no plan.
    run = records.read(store, AdmittedRun, fleet_layout.admitted(fleet_layout.run_id(URL)))
    records.put(second, fleet_layout.admitted(run.id), run)
    with pytest.raises(ValueError, match=said):
        check_admitted(moved)
    check_admitted(settings)
    leave(FLEET, URL, "it moves", ManualClock())
    check_admitted(moved)
    assert admit(moved, model, PROFILE, ManualClock()).run == run
