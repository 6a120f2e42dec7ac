"""The checks of how responses change hands between living members: by asks, by cuts, and never while a tool runs.

A member releases responses on request. A member that cuts releases all its responses, once, and only if members with
more responses have room for them by the heartbeats just read; two members therefore never cut into each other. A
response whose turn waits for an answer is neither released nor taken from the living: its call would be made again.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from simulation.judge_promises import CLAIM_REQUESTS
from simulation.ledger import Claim, Ledger
from simulation.reference_reader import Reference
from simulation.simulated_history import History
from simulation.stored_objects import body_of
from storage.journal.shard import Finish, Row
from storage.records import layout
from storage.stores.store import CorruptObject


@dataclass(frozen=True)
class Release:
    """A shard's releases: responses, time, and the responses that the incarnation had ended by the time."""

    incarnation: str
    at_s: float
    responses: frozenset[int]
    ended: frozenset[int]

    @property
    def slot(self) -> int:
        return int(self.incarnation.split("-")[0])


def owes_answer(rows: Sequence[Row]) -> bool:
    """Whether the last turn in these rows of a response, in order, is not answered."""
    owes = False
    for row in rows:
        owes = row.finish is Finish.ACTING or (owes and row.event is None)
    return owes


def check_releases(ledger: Ledger, history: History, reference: Reference) -> int:
    """Check all releases of an iteration; returns how many members cut."""
    _check_owed(ledger, reference)
    cuts = 0
    asked = _asked(ledger)
    for incarnation, releases in _releases(ledger, reference).items():
        mine = [(each, _unasked(each, asked.get(incarnation, ()))) for each in releases]
        unasked = [(each, responses) for each, responses in mine if responses]
        if len(unasked) > 1:
            ledger.breaks(f"livelock: {incarnation} cut {len(unasked)} times")
        for release, responses in unasked:
            cuts += 1
            _check_cut(ledger, history, release, responses)
    return cuts


def _check_owed(ledger: Ledger, reference: Reference) -> None:
    for response in range(reference.plan.num_responses):
        rows: list[Row] = []
        for span in reference.lineage(response):
            for _, row in reference.rows_of(response, span):
                if row.finish is Finish.RELEASED and owes_answer(rows):
                    ledger.breaks(f"turns: {span.incarnation} released response {response} while its tool ran")
                rows.append(row)


def _asked(ledger: Ledger) -> Mapping[str, Sequence[tuple[float, frozenset[int]]]]:
    """For each incarnation, the asks to it: time and responses."""
    asked: dict[str, list[tuple[float, frozenset[int]]]] = defaultdict(list)
    for key, body in ledger.created.items():
        if key.startswith(layout.asks(ledger.iteration)):
            found = frozenset(body_of(key, "ask", body)["responses"])
            asked[key.split("/")[-2]].append((ledger.created_at_s[key], found))
    return asked


def _unasked(release: Release, asked: Sequence[tuple[float, frozenset[int]]]) -> frozenset[int]:
    return release.responses.difference(*(found for at_s, found in asked if at_s <= release.at_s))


def _releases(ledger: Ledger, reference: Reference) -> Mapping[str, Sequence[Release]]:
    """The shards with releases of each incarnation, in order."""
    shards: dict[str, dict[int, list[tuple[int, Row]]]] = defaultdict(lambda: defaultdict(list))
    for (incarnation, _, response), rows in reference.rows.items():
        for sequence, row in rows:
            shards[incarnation][sequence].append((response, row))
    found = {}
    for incarnation, by_sequence in shards.items():
        ended: set[int] = set()
        releases = []
        for sequence, rows_of_all in sorted(by_sequence.items()):
            ended |= {response for response, row in rows_of_all if row.finish.ends_response}
            released = frozenset(response for response, row in rows_of_all if row.finish is Finish.RELEASED)
            if released:
                at_s = ledger.created_at_s[layout.shard(ledger.iteration, incarnation, sequence)]
                releases.append(Release(incarnation, at_s, released, frozenset(ended)))
        found[incarnation] = releases
    return found


def _check_cut(ledger: Ledger, history: History, cut: Release, responses: frozenset[int]) -> None:
    """Check that a member may cut, has ended enough, and saw room for its releases in members with more responses."""
    name, number = cut.incarnation, len(responses)
    if history.cut_share is None or not history.is_crew(cut.slot):
        ledger.breaks(f"livelock: {name} released {sorted(responses)}, which no member asked for")
        return
    planned = {*responses, *history.plan.responses_of(cut.slot), *cut.ended}
    if (len(planned) - number) / len(planned) < history.cut_share:
        ledger.breaks(
            f"livelock: {name} cut {number} of {len(planned)} responses; allowed: {history.cut_share:.0%} ended"
        )
    # It waits with its decision until no tool is at work for it.
    since_s = cut.at_s - unseen_s(history) - history.call_s_max
    if ledger.is_troubled(name, since_s, cut.at_s):
        return
    rooms: dict[str, int] = {}
    for other, unfinished, room in _seen(ledger, history, name, since_s, cut.at_s):
        if (unfinished, other) > (number, name):
            rooms[other] = max(room, rooms.get(other, 0))
    if sum(rooms.values()) < number:
        ledger.breaks(f"livelock: {name} cut {number} responses into {rooms}, the rooms of those that hold more")


def unseen_s(history: History) -> float:
    """How long after it has read a journal or a heartbeat a member may still act on what it read."""
    return history.slowest_step_s + CLAIM_REQUESTS / 2 * history.weather.latency_s


def _seen(
    ledger: Ledger, history: History, name: str, since_s: float, until_s: float
) -> Iterator[tuple[str, int, int]]:
    """What a member read of working members of other slots of the crew: names, what they held, and their room."""
    slot = int(name.split("-", maxsplit=1)[0])
    for at_s, key, body in ledger.beats_read.get(name, ()):
        if not since_s <= at_s <= until_s:
            continue
        try:
            beat = body_of(key, "heartbeat", body)
        except (CorruptObject, ValueError, KeyError):
            continue
        if beat.get("state") == "working" and history.is_crew(beat["slot"]) and beat["slot"] != slot:
            yield beat["incarnation"], beat.get("unfinished", 0), beat.get("room", 0)


def takes_from_tool(ledger: Ledger, history: History, reference: Reference, response: int, claim: Claim) -> bool:
    """Whether a claim takes a response whose turn its holder had journalled, and which waited for its answer.

    What the holder wrote just before the claim, the claimer may have read too late.
    """
    known_s = claim.at_s - unseen_s(history)
    if ledger.is_troubled(claim.incarnation, known_s, claim.at_s):
        return False
    holder_s: list[tuple[float, Row]] = []
    for (name, _, number), rows in reference.rows.items():
        if number == response and name in claim.sealed:
            holder_s += [
                (ledger.created_at_s[layout.shard(ledger.iteration, name, sequence)], row)
                for sequence, row in rows
                if sequence <= claim.sealed[name]
            ]
    if not holder_s or max(at_s for at_s, _ in holder_s) > known_s:
        return False
    return owes_answer([row for _, row in sorted(holder_s, key=lambda each: each[0])])
