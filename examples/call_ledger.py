"""A tool's own ledger of its calls, in SQLite: how often each call was begun and ended, by any process.

The ledger is outside of the run, so it can tell what a journal cannot: that a call was made twice. `audited` compares
the two.
"""

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from storage.journal.turns import TurnRecord
from tasks.turns.current_call import CurrentCall

BUSY_TIME_LIMIT_S = 30.0


@dataclass(frozen=True)
class LedgerRow:
    """How often a call was begun and ended. process: the id of the process that began it last."""

    call_id: str
    iteration: int
    response: int
    process: int
    begun: int
    ended: int


class CallLedger:
    """The ledger in a file, which any number of processes may use at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._transaction() as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS calls (call_id TEXT PRIMARY KEY, iteration INTEGER, response INTEGER, "
                "process INTEGER, begun INTEGER, ended INTEGER)"
            )
            database.execute("CREATE TABLE IF NOT EXISTS sleeps (iteration INTEGER, response INTEGER, seconds REAL)")

    def order_sleep(self, iteration: int, response: int, seconds: float) -> None:
        """Have the next call of a response sleep once, as a slow tool does."""
        with self._transaction() as database:
            database.execute("INSERT INTO sleeps VALUES (?, ?, ?)", (iteration, response, seconds))

    def begin(self, call: CurrentCall, process: int) -> float:
        """Note that a call begins; returns the seconds for which it is to sleep."""
        with self._transaction() as database:
            database.execute(
                "INSERT INTO calls VALUES (?, ?, ?, ?, 1, 0) "
                "ON CONFLICT (call_id) DO UPDATE SET begun = begun + 1, process = excluded.process",
                (call.call_id, call.iteration, call.response, process),
            )
            found = database.execute(
                "DELETE FROM sleeps WHERE iteration = ? AND response = ? RETURNING seconds",
                (call.iteration, call.response),
            )
            return float(sum(seconds for (seconds,) in found.fetchall()))

    def end(self, call: CurrentCall) -> None:
        """Note that a call has ended."""
        with self._transaction() as database:
            database.execute("UPDATE calls SET ended = ended + 1 WHERE call_id = ?", (call.call_id,))

    def rows(self, iteration: int) -> list[LedgerRow]:
        """The calls of an iteration, in the order in which they were first begun."""
        with self._transaction() as database:
            found = database.execute("SELECT * FROM calls WHERE iteration = ? ORDER BY rowid", (iteration,))
            return [LedgerRow(*row) for row in found.fetchall()]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=BUSY_TIME_LIMIT_S)) as database:
            # Processes are killed here, and machines are not, so nothing need reach the disk.
            database.execute("PRAGMA synchronous = OFF")
            with database:
                database.execute("BEGIN IMMEDIATE")
                yield database


@dataclass(frozen=True)
class Audit:
    """What the ledger says of the calls that an iteration's responses record.

    repeated: ids of calls that were begun again although an answer stood in the journal. unknown: of calls whose answer
    was not journalled when their member was killed, as the records say. again: of those, the ones that were begun
    again. untold: ids that are in the ledger or in the records, but not in both.
    """

    turns: int
    calls: int
    repeated: frozenset[str]
    unknown: frozenset[str]
    again: frozenset[str]
    untold: frozenset[str]
    diverged: int

    def holds(self, interrupted: Collection[str]) -> bool:
        """Whether no answered call was made again, and the calls that a kill interrupted were, as unknown ones."""
        return not self.repeated and not self.untold and set(interrupted) <= self.again and not self.diverged


def audited(rows: Sequence[LedgerRow], records: Sequence[TurnRecord]) -> Audit:
    """Compare the ledger of an iteration with the records of all turns of its responses."""
    calls = [call for record in records for call in record.calls if call.outcome != "invalid"]
    unknown = frozenset(call.call_id for call in calls if call.unknown)
    begun = {row.call_id: row.begun for row in rows}
    again = frozenset(call_id for call_id, times in begun.items() if times > 1)
    return Audit(
        turns=len(records),
        calls=len(calls),
        repeated=again - unknown,
        unknown=unknown,
        again=again & unknown,
        untold=frozenset(begun.keys() ^ {call.call_id for call in calls}),
        diverged=sum(record.diverged for record in records),
    )
