"""The tab "Host" of an iteration's Deck: what the host that trains the run did since the phase before.

Runs of other teams have no name there. The page is for people, so nothing that goes wrong here matters to the run.
"""

import logging
import math
from collections.abc import Mapping, Sequence

from storage.fleet import fleet_layout
from storage.fleet.fleet_reading import read_run
from storage.fleet.fleet_records import FleetRecord, read_record
from storage.fleet.seats import newest_seat
from storage.fleet.spent_records import SpentEntry, SpentRecord
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.reporting.deck import styled
from tasks.reporting.host_chart import host_chart
from tasks.sharing.membership import open_fleet
from tasks.sharing.tolerated_errors import EXPECTED

log = logging.getLogger(__name__)
# A record is written once a minute; an hour of the host is read at most.
RECORDS_MAX = 60
PHASES_SHOWN = 2
LEFT_OUT: tuple[type[Exception], ...] = (*EXPECTED, LookupError)


def host_tab(config: RunConfig) -> dict[str, str]:
    """The tab by its name; none if no host trains the run, or if its host's records cannot be read."""
    url = config.trainer.fleet_of(config.run.url)
    if url is None:
        return {}
    try:
        store, fleet = open_fleet(url)
        own = fleet_layout.run_id(config.run.url)
        seat = newest_seat(store, own)
        entries = [] if seat is None else last_phases(store, seat.host, own)
        return {"Host": _drawn(entries, names_for(store, fleet, config.run.url, entries), own)} if entries else {}
    except LEFT_OUT as error:
        log.warning("what the run's host did cannot be shown: %s", error)
        return {}


def last_phases(store: ObjectStore, host: str, run: str) -> list[SpentEntry]:
    """Return the recorded time of the host from the end of the run's third-last phase on, in order of time."""
    found: list[SpentEntry] = []
    for key in store.list(fleet_layout.spent_by(host))[: -RECORDS_MAX - 1 : -1]:
        found = [*read_record(store, SpentRecord, key).entries, *found]
        if len(_phases(found, run)) > PHASES_SHOWN:
            break
    phases = _phases(found, run)
    if len(phases) <= PHASES_SHOWN:
        return found
    before = [entry for entry in found if entry.run == run and entry.iteration == phases[-PHASES_SHOWN - 1]]
    return [entry for entry in found if entry.began_s >= before[-1].ended_s]


def _phases(entries: Sequence[SpentEntry], run: str) -> list[int]:
    """The run's iterations among the entries, in order of time."""
    return list(dict.fromkeys(each.iteration for each in entries if each.run == run and each.iteration is not None))


def names_for(store: ObjectStore, fleet: FleetRecord, run_url: str, entries: Sequence[SpentEntry]) -> dict[str, str]:
    """What each run in the entries is called on the page of one run, by id."""
    names = {fleet_layout.run_id(run_url): "this run"}
    for run_id in sorted({entry.run for entry in entries if entry.run is not None} - names.keys()):
        names[run_id] = "another run"
        try:
            run = read_run(store, run_id)
        except (ObjectMissing, CorruptObject):
            continue
        if fleet.name_for(run_url, run) == run.run_url:
            names[run_id] = run.run_url.rstrip("/").rpartition("/")[2]
    return names


def _drawn(entries: Sequence[SpentEntry], names: Mapping[str, str], own: str) -> str:
    all_s = math.fsum(entry.seconds for entry in entries)
    own_s = math.fsum(entry.seconds for entry in entries if entry.run == own)
    idle_s = math.fsum(entry.seconds for entry in entries if entry.run is None)
    summary = (
        f"Of the last {all_s:.0f} s that the run's host has recorded, {100 * own_s / all_s:.0f} % were this run's, and "
        f"{100 * idle_s / all_s:.0f} % were idle. The host records once a minute, so the last phase may be missing."
    )
    return styled([f"<p>{summary}</p>", host_chart(entries, names, own, "The host that trains this run")])
