"""Admission beside living hosts, whose heartbeats change while the command watches."""

from dataclasses import replace

import pytest

from storage import fleet_layout, layout, records
from storage.connect import connect
from storage.fleet_records import FleetRecord
from storage.package_version import VERSION
from storage.records import ReportRecord, RunRecord
from storage.seats import take_seat
from tasks.sharing.fleet_admission import Profile, admit, check_admitted, host_name
from tests.fleet_records import TTL_S, BeatingClock, a_beat, a_host
from tests.small_run import config, memory_store

FLEET, URL = "memory://admitting", "memory://admitted/run"
PROFILE = Profile(phase_s=60.0, cycle_s=300.0)


@pytest.fixture
def settings(model):
    return config(URL, model, trainer={"placement": "shared", "fleet": FLEET})


@pytest.fixture
def store():
    made = memory_store("admitting")
    rules = FleetRecord(run_prefixes=("memory://admitted",), host_ttl_s=TTL_S, created_at_s=0.0)
    records.put(made, fleet_layout.FLEET, rules)
    return made


def announce(store, name, memory_bytes):
    records.put(store, fleet_layout.host(name), a_host(name, memory_bytes))
    records.put(store, fleet_layout.alive(name), a_beat(name, 0))


def test_a_run_is_admitted_for_a_host_that_lives(store, settings, model):
    announce(store, "silent", 1 << 40)
    announce(store, "alive", 1 << 40)
    admission = admit(settings, model, PROFILE, BeatingClock(store, {"alive": "idle"}))
    assert [host_name(admission, choice) for choice in admission.choices] == ["a-machine (alive)"]
    assert fleet_layout.admitted(admission.run.id) in store.list("")


def test_a_state_that_no_host_can_hold_is_refused(store, settings, model):
    announce(store, "small", 10)
    with pytest.raises(ValueError, match=r"run is not admitted: no host's memory holds \d+ bytes beside"):
        admit(settings, model, PROFILE, BeatingClock(store, {"small": "idle"}))
    assert store.list(fleet_layout.RUNS) == []


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
