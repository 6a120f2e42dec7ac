"""The Deck's tab on the host: which stretch it shows, and what it tells of runs of other teams."""

from dataclasses import replace

import pytest

from storage.fleet import fleet_layout
from storage.fleet.fleet_records import FleetRecord
from storage.fleet.seats import take_seat
from storage.fleet.spent_records import SpentEntry, SpentRecord
from storage.records import records
from tasks.concluding.host_tab import host_tab, last_phases
from tests.fleet_records import a_run
from tests.small_run import config, memory_store

OWN, NEAR, THEIRS = "memory://runs/mine/own", "memory://runs/mine/near", "memory://theirs/secret-plan"
IDS = {url: fleet_layout.run_id(url) for url in (OWN, NEAR, THEIRS)}


@pytest.fixture
def settings(model):
    return config(OWN, model, trainer={"placement": "shared", "fleet": "memory://shown"})


@pytest.fixture
def store():
    made = memory_store("shown")
    prefixes = ("memory://runs/mine", "memory://theirs")
    records.put(made, fleet_layout.FLEET, FleetRecord(run_prefixes=prefixes, host_ttl_s=30.0, created_at_s=0.0))
    for url, run_id in IDS.items():
        records.put(made, fleet_layout.admitted(run_id), replace(a_run("x"), run_url=url, id=run_id))
    take_seat(made, IDS[OWN], 0, "h")
    return made


def spend(store, *stretches, per_record=2):
    """Write (url, iteration) phases of 10 s each, and None for 10 s of idle time."""
    entries = []
    for number, phase in enumerate(stretches):
        url, iteration = phase or (None, None)
        entries.append(
            SpentEntry(
                kind="idle" if url is None else "train",
                run=None if url is None else IDS[url],
                iteration=iteration,
                began_s=10.0 * number,
                ended_s=10.0 * number + 10.0,
            )
        )
    for number, first in enumerate(range(0, len(entries), per_record)):
        part = tuple(entries[first : first + per_record])
        record = SpentRecord(host="h", sequence=number, entries=part, seated=tuple(sorted(IDS.values())))
        records.put(store, fleet_layout.spent("h", number), record)
    return entries


def test_a_run_with_a_trainer_of_its_own_has_no_such_tab(model):
    assert host_tab(config(OWN, model)) == {}


def test_the_last_two_phases_are_shown_with_all_that_came_between(store):
    entries = spend(store, (OWN, 0), (NEAR, 0), (OWN, 1), None, (THEIRS, 5), (OWN, 2), (NEAR, 1))
    assert last_phases(store, "h", IDS[OWN]) == entries[1:]
    assert last_phases(store, "h", IDS[NEAR]) == entries


def test_records_that_are_not_needed_are_not_read(store):
    entries = spend(store, *[(OWN, number) for number in range(40)], per_record=4)
    store.put(fleet_layout.spent("h", 0), b"garbage")
    assert last_phases(store, "h", IDS[OWN]) == entries[-2:]


def test_runs_of_other_teams_have_no_name_and_no_iteration(store, settings):
    spend(store, (OWN, 3), (NEAR, 1), (THEIRS, 987654), (OWN, 4), None)
    [page] = host_tab(settings).values()
    assert "this run, iteration 4" in page
    assert ">near<" in page
    assert ">another run<" in page
    assert "secret-plan" not in page
    assert "987654" not in page
    assert "40 % were this run's, and 20 % were idle" in page


def test_what_cannot_be_read_only_leaves_the_tab_out(store, settings, caplog):
    assert host_tab(settings) == {}
    store.put(fleet_layout.spent("h", 0), b"garbage")
    assert host_tab(settings) == {}
    assert "what the run's host did cannot be shown" in caplog.text
    store.delete(fleet_layout.FLEET)
    assert host_tab(settings) == {}
