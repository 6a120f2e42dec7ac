"""The tab "Host" of an iteration's Deck: what the host that trains the run did since the phase before.

Runs of other teams have no name there. The page is for people, so nothing that goes wrong here matters to the run.
"""

import logging
import math
from collections.abc import Mapping, Sequence

from resources.visible_text import markup
from storage.fleet import fleet_layout
from storage.fleet.fleet_reading import read_run
from storage.fleet.fleet_records import FleetRecord, read_record
from storage.fleet.seats import newest_seat
from storage.fleet.spent_records import SpentEntry, SpentKind, SpentRecord
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.reporting import svg
from tasks.reporting.deck import styled
from tasks.reporting.svg import PALETTE, Frame
from tasks.sharing.membership import open_fleet
from tasks.sharing.tolerated_errors import EXPECTED

log = logging.getLogger(__name__)
# A record is written once a minute; an hour of the host is read at most.
RECORDS_MAX = 60
PHASES_SHOWN = 2
ENTRIES_MAX = 300
NAME_LENGTH_MAX = 18
_ROW_HEIGHT, _BAR_HEIGHT = 30, 19
_TOP, _LEFT, _RIGHT = 80, 150, svg.WIDTH - 40
# How each kind is called and drawn; idle time is where no run has a bar.
_KINDS: dict[SpentKind, tuple[str, str]] = {
    "switch": ("its state comes to the device", PALETTE[5]),
    "wait": ("waits for groups", PALETTE[4]),
    "train": ("trains", PALETTE[0]),
    "park": ("its state leaves the device", PALETTE[3]),
}
_KEY_X = (0, 210, 350, 430)
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


def host_chart(entries: Sequence[SpentEntry], names: Mapping[str, str], own: str, title: str) -> str:
    """Draw a stretch of a host's time; seconds are shown from its beginning.

    entries: in order of time; the last 300 are drawn. names: what each run is called, by id. own: the id of the run
    whose page this is; it is the first row, and only its iterations are told.
    """
    drawn = entries[-ENTRIES_MAX:]
    if not drawn:
        return svg.card(title, 90, [svg.text(20, 62, "no data", fill=svg.MUTED)])
    began_s, duration_s = drawn[0].began_s, max(drawn[-1].ended_s - drawn[0].began_s, 1e-3)
    runs = list(dict.fromkeys([own, *(entry.run for entry in drawn if entry.run is not None)]))
    bottom = _TOP + len(runs) * _ROW_HEIGHT
    axis = Frame(_LEFT, _TOP, _RIGHT, bottom, (0.0, duration_s), (0.0, 1.0))
    parts = _key() + axis.x_axis("seconds")
    parts += [svg.line((axis.x(tick), _TOP - 6), (axis.x(tick), bottom)) for tick in svg.ticks(0.0, duration_s)]
    for row, run in enumerate(runs):
        top = _TOP + row * _ROW_HEIGHT
        parts.append(svg.text(_LEFT - 10, top + 14, _cut(names[run]), text_anchor="end"))
        parts += [_bar(axis, entry, top, began_s, names[run], own) for entry in drawn if entry.run == run]
    return svg.card(title, bottom + 52, parts)


def _bar(axis: Frame, entry: SpentEntry, top: float, began_s: float, name: str, own: str) -> str:
    x = axis.x(entry.began_s - began_s)
    width = max(1.0, axis.x(entry.ended_s - began_s) - x)
    does, colour = _KINDS[entry.kind]
    whose = f"{name}, iteration {entry.iteration}" if entry.run == own else name
    hint = svg.element("title", markup(f"{whose}: {does}, {entry.seconds:.1f} s"))
    return svg.element("rect", hint, x=x, y=top, width=width, height=_BAR_HEIGHT, rx=1, fill=colour)


def _key() -> list[str]:
    """The legend, to the right of the title's line."""
    parts = []
    for x, (does, colour) in zip(_KEY_X, _KINDS.values(), strict=True):
        parts.append(svg.element("rect", x=_LEFT + x, y=46, width=18, height=11, rx=2, fill=colour))
        parts.append(svg.text(_LEFT + x + 24, 56, does, fill=svg.MUTED))
    return parts


def _cut(name: str) -> str:
    return name if len(name) <= NAME_LENGTH_MAX else f"{name[: NAME_LENGTH_MAX - 1]}…"
