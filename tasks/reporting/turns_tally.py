"""Turns: how often the policy called tools, and what became of the calls, as the journal says.

Only what counts is measured: not the turns before a response began again, and none of a response without a batch.
"""

from collections import Counter
from collections.abc import Iterable

from storage.journal.assembly import JournalReader
from storage.journal.shard import Finish
from storage.journal.turns import TurnRecord, decode_turn
from storage.records.records import GradedResponse, Span

# The outcomes of calls that have a metric of their own.
OUTCOMES = ("invalid", "raised", "timed_out")


class TurnsTally:
    """The turns of recorded responses, added up part by part while a part's rows are in memory."""

    def __init__(self, reader: JournalReader, recorded: Iterable[GradedResponse]) -> None:
        self._reader = reader
        self._recorded = {response.response: response for response in recorded}
        self._turns: list[int] = []
        self._failed = 0
        self._restarted = 0
        self._diverged = 0
        self._unknown = 0
        self._outcomes: Counter[str] = Counter()
        self._tool_s = 0.0

    def add(self, part: range) -> None:
        """Count the turns of a part, whose rows the reader holds now; raises ValueError for an event that is none."""
        for number in part:
            response = self._recorded.get(number)
            if response is None:
                continue
            events = self._events(number, response.lineage)
            self._failed += response.finish_reason == "failed"
            if events:
                self._turns.append(len(events))
            for event in events:
                self._count(decode_turn(event))

    def metrics(self) -> dict[str, float]:
        """The metrics of docs/guide/metrics.md; empty if no response has turns."""
        if not self._turns:
            return {}
        return {
            "turns/mean": sum(self._turns) / len(self._turns),
            "turns/answers": float(sum(self._turns)),
            "turns/max": float(max(self._turns)),
            "turns/calls": float(self._outcomes.total()),
            **{f"turns/calls_{outcome}": float(self._outcomes[outcome]) for outcome in OUTCOMES},
            "turns/calls_unknown": float(self._unknown),
            "turns/diverged": float(self._diverged),
            "turns/restarted": float(self._restarted),
            "turns/failed_share": self._failed / len(self._recorded),
            "turns/tool_seconds": self._tool_s,
        }

    def _events(self, response: int, lineage: Iterable[Span]) -> list[bytes]:
        """The answers to a response's turns, since it last began again."""
        events: list[bytes] = []
        for span in lineage:
            for at, row in self._reader.shards.rows(span.incarnation, span.epoch, response):
                if at > span.last_sequence:
                    break
                if row.finish is Finish.AGAIN:
                    self._restarted += 1
                    events.clear()
                elif row.event is not None:
                    events.append(row.event)
        return events

    def _count(self, turn: TurnRecord) -> None:
        self._diverged += turn.diverged
        self._tool_s += turn.seconds
        for call in turn.calls:
            self._outcomes[call.outcome] += 1
            self._unknown += call.unknown
