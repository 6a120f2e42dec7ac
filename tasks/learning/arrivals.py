"""Arrivals: the predicted time of each member's next shard, so that few requests find nothing.

A reader learns of a shard by asking for it. To ask a thousand members once a second is a thousand requests, of which
four of five find nothing, because a member writes once in a flush interval. A small crew is asked at every look.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from storage.journal.assembly import JournalReader

ASKED_AT_EVERY_LOOK = 100
# After so many shards that came as expected, one is asked for a look too early, and the journal is read to its end. So
# a member that writes more often than expected is noticed.
TRUSTED = 4


@dataclass(slots=True)
class _Expected:
    """The prediction of one member's next shard.

    Attributes:
        at_s: Moment from which the shard is requested, on the reader's monotonic clock.
        trusted: Consecutive shards that came as predicted.
        missed: True if the last request after `at_s` found no shard.
    """

    at_s: float
    trusted: int = 0
    missed: bool = False


class Arrivals:
    """The predictions of a reader for all members, learned from the moments at which shards arrive."""

    def __init__(self, flush_interval_s: float, poll_interval_s: float) -> None:
        """poll_interval_s: the pause between two looks. All moments are on the reader's monotonic clock."""
        self._flush_interval_s = flush_interval_s
        self._poll_interval_s = poll_interval_s
        self._expected: dict[str, _Expected] = {}

    def due(self, incarnations: Sequence[str], now_s: float) -> tuple[list[str], list[str]]:
        """Return the members whose journals are read to the end now, and the members of whom one shard is requested."""
        if len(incarnations) <= ASKED_AT_EVERY_LOOK:
            return list(incarnations), []
        whole, one = [], []
        for name in incarnations:
            expected = self._expected.get(name)
            if expected is None or self._may_be_several(expected, now_s):
                whole.append(name)
            elif now_s >= expected.at_s:
                one.append(name)
        return whole, one

    def note(self, asked: Collection[str], came: Collection[str], now_s: float) -> None:
        """Note whose shards were asked for at `now_s`, and whose came."""
        for name in asked:
            expected = self._expected.get(name)
            if name not in came:
                if expected is not None:
                    expected.missed, expected.trusted = True, 0
            elif expected is None or expected.missed or self._is_late(expected, now_s):
                # It was written since the last look.
                self._expected[name] = _Expected(now_s - self._poll_interval_s / 2 + self._flush_interval_s)
            elif expected.trusted >= TRUSTED:
                self._expected[name] = _Expected(now_s + self._flush_interval_s)
            else:
                expected.at_s += self._flush_interval_s
                expected.trusted += 1

    def _may_be_several(self, expected: _Expected, now_s: float) -> bool:
        to_check = expected.trusted >= TRUSTED and now_s >= expected.at_s - self._poll_interval_s
        return to_check or self._is_late(expected, now_s)

    def _is_late(self, expected: _Expected, now_s: float) -> bool:
        return now_s > expected.at_s + self._flush_interval_s


class ArrivingShards:
    """The reads of one reader that follows an iteration: each look asks for shards that can still count."""

    def __init__(self, reader: JournalReader, flush_interval_s: float, poll_interval_s: float) -> None:
        """flush_interval_s: between two shards of a member. poll_interval_s: between two looks."""
        self._reader = reader
        self._arrivals = Arrivals(flush_interval_s, poll_interval_s)

    def look(self, unended: Callable[[], Sequence[int]], now_s: float) -> None:
        """Read new claims, then the shards that may have come of unended responses.

        A journal whose rows are void, or sealed and read, is not asked again, however many members have died. unended:
        called after the claims, which may void an end. now_s: on the reader's monotonic clock. Raises CorruptObject.
        """
        shards = self._reader.shards
        self._reader.book.refresh()
        names = self._reader.incarnations_to_read(unended())
        whole, one = self._arrivals.due(names, now_s)
        before = {name: shards.last_sequence(name) for name in (*whole, *one)}
        shards.advance_all(whole)
        shards.advance_some(one, len(one))
        came = {name for name, last in before.items() if shards.last_sequence(name) > last}
        self._arrivals.note(before.keys(), came, now_s)
