"""The journal of an iteration: appends one incarnation's tokens as shards, and reads any incarnation's shards back.

A writer numbers its shards from 0 without gaps and has at most one in flight. A reader asks for the next number until a
shard is missing, and then has exactly the durable shards of this moment (docs/format.md algorithm J).
"""

import sys
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, KeysView, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from storage.journal.shard import Finish, Origin, Row, decode_shard, encode_shard
from storage.records import layout
from storage.stores.store import ConflictingRecord, ObjectMissing, ObjectStore, commit

# As many connections as a store keeps open (storage/stores/s3.py).
PARALLEL_READS = 32


@dataclass(slots=True)
class _Pending:
    start: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = Finish.RUNNING
    event: bytes | None = None

    @property
    def end(self) -> int:
        """Where the next row of the response starts."""
        return 0 if self.finish is Finish.AGAIN else self.start + len(self.token_ids)


class PendingRows:
    """Tokens that were decoded or observed and are not in a shard yet, by response and epoch.

    objects: bodies that events name by digest, to be stored ahead of the shard.
    """

    def __init__(self) -> None:
        # Of each response the row that tokens are appended to is the last one.
        self._rows: dict[tuple[int, int], list[_Pending]] = {}
        self.objects: dict[str, bytes] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def append(
        self,
        response: int,
        epoch: int,
        start: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        finish: Finish,
    ) -> None:
        """Keep tokens for the next shard; `start` must continue where the last append of this response ended."""
        rows = self._rows.get((response, epoch))
        if rows is None:
            row = _Pending(start)
            self._rows[response, epoch] = [row]
        else:
            row = rows[-1]
            if row.finish is not Finish.RUNNING or row.event is not None:
                row = self._following(response, rows, start)
        kept = row.token_ids
        if row.start + len(kept) != start:
            raise ValueError(f"response {response}: tokens at {start}, expected {row.start + len(kept)}")
        kept.extend(token_ids)
        row.logprobs.extend(logprobs)
        row.finish = finish

    def observe(
        self, response: int, epoch: int, start: int, token_ids: Sequence[int], event: bytes, finish: Finish
    ) -> None:
        """Keep an observation for the next shard; `start` as in `append`."""
        rows = self._rows.setdefault((response, epoch), [])
        row = self._following(response, rows, start)
        row.token_ids.extend(token_ids)
        row.event, row.finish = event, finish

    def _following(self, response: int, rows: list[_Pending], start: int) -> _Pending:
        """A new row after those of the response."""
        if rows and rows[-1].end != start:
            raise ValueError(f"response {response}: tokens at {start}, expected {rows[-1].end}")
        rows.append(_Pending(start))
        return rows[-1]

    def drop(self, responses: Collection[int]) -> None:
        """Forget the tokens of responses claimed by another member: written tokens would be void."""
        for key in [key for key in self._rows if key[0] in responses]:
            del self._rows[key]

    def rows(self, weight_version: int) -> list[Row]:
        """The rows of a shard, in the order in which the responses came."""
        return [
            Row(
                response,
                epoch,
                row.start,
                np.array(row.token_ids, dtype=np.uint32),
                np.array(row.logprobs, dtype=np.float32),
                weight_version,
                row.finish,
                Origin.POLICY if row.event is None else Origin.OBSERVATION,
                row.event,
            )
            for (response, epoch), rows in self._rows.items()
            for row in rows
        ]


class JournalWriter:
    """Writes one incarnation's shards, numbered without gaps; at most one call of `write` may be under way."""

    def __init__(self, store: ObjectStore, iteration: int, incarnation: str, weight_version: int) -> None:
        self._store = store
        self._iteration = iteration
        self._incarnation = incarnation
        self._weight_version = weight_version
        self._unwritten: deque[PendingRows] = deque()
        self._offered: tuple[bytes, int] | None = None  # the first of them, encoded, and its number of tokens
        self._sequence = 0
        self._is_writing = False

    def write(self, pending: PendingRows) -> int:
        """Write the tokens as one shard; returns how many tokens became durable, with those of earlier failed calls.

        After a failure the next call offers the same shard again, with the same bytes and number, before any other: the
        outcome of the failed call may be unknown (StoreUnavailable), and tokens must be written in order. Raises
        ConflictingRecord if a second process writes under this incarnation.
        """
        assert not self._is_writing, "two shards of one incarnation are written at once"
        self._is_writing = True
        try:
            if pending:
                self._unwritten.append(pending)
            written = 0
            while self._unwritten:
                written += self._write_first()
            return written
        finally:
            self._is_writing = False

    def _write_first(self) -> int:
        if self._offered is None:
            for digest, body in self._unwritten[0].objects.items():
                commit(self._store, layout.environment_state(self._iteration, digest), body)
            rows = self._unwritten[0].rows(self._weight_version)
            self._offered = encode_shard(rows), sum(len(row.token_ids) for row in rows)
        body, tokens = self._offered
        key = layout.shard(self._iteration, self._incarnation, self._sequence)
        if not commit(self._store, key, body):
            raise ConflictingRecord(f"{key!r} was written by another process under the same incarnation")
        self._unwritten.popleft()
        self._offered = None
        self._sequence += 1
        return tokens


class ShardReader:
    """Shards of any number of incarnations, in order; rows by (incarnation, epoch, response).

    Each shard is fetched once, unless the reader keeps the rows of some responses only and is turned to others.
    """

    def __init__(
        self,
        store: ObjectStore,
        iteration: int,
        parallel_reads: int = PARALLEL_READS,
        kept: range | None = None,
    ) -> None:
        """kept: the responses whose rows are kept, until `turn_to` names others; None: all, for good.

        parallel_reads: how many requests may be under way at once; 1 makes them in the caller's thread.
        """
        self._store = store
        self._iteration = iteration
        self._parallel_reads = parallel_reads
        self._kept = kept
        # The responses in each shard; about 400 bytes a shard, and only where rows are dropped.
        self._found: dict[str, list[npt.NDArray[np.uint32]]] = defaultdict(list)
        self._next: dict[str, int] = {}
        self._rows: dict[tuple[str, int, int], list[tuple[int, Row]]] = defaultdict(list)
        # Where end marks stand, counted or void: (incarnation, epoch, number of the shard).
        self._ends: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
        self._tokens: dict[str, int] = defaultdict(int)

    @property
    def ended(self) -> KeysView[int]:
        """Responses for which some row, counted or void, carries an end mark."""
        return self._ends.keys()

    def ends(self, response: int) -> Sequence[tuple[str, int, int]]:
        """Where rows of the response carry an end mark, counted or void: (incarnation, epoch, number of the shard)."""
        return self._ends.get(response, ())

    def tokens(self, incarnation: str) -> int:
        """Sampled tokens in the shards of an incarnation that were read so far, counted or void."""
        return self._tokens[incarnation]

    def last_sequence(self, incarnation: str) -> int:
        """The number of the last shard read of an incarnation; -1 if none was read."""
        return self._next.get(incarnation, 0) - 1

    def advance(self, incarnation: str) -> int:
        """Fetch the shards that were not read yet, up to the first gap; returns the last number, or -1.

        The reader asks for the next number until a shard is missing: a GET costs a twelfth of a LIST. Parallel requests
        double with each round, so a successor does not wait for hundreds of round trips.
        """
        self._fetch_all([incarnation])
        return self.last_sequence(incarnation)

    def advance_all(self, incarnations: Iterable[str]) -> None:
        """Fetch the unread shards of all given incarnations."""
        self._fetch_all(list(incarnations))

    def advance_some(self, incarnations: Iterable[str], shards_max: int) -> bool:
        """Fetch at most `shards_max` shards of these incarnations, and one of each; returns whether none is left."""
        names = list(incarnations)
        return self._fetch_all(names, max(1, shards_max // max(1, len(names))))

    def turn_to(self, responses: range) -> None:
        """Forget all rows, and read the shards again in which rows of these responses were seen; keep those rows.

        What `ended`, `tokens` and `last_sequence` say does not change. Raises ObjectMissing for a shard that was
        deleted meanwhile, and ValueError if this reader keeps all rows.
        """
        if self._kept is None:
            raise ValueError("kept: value None; allowed: a range of responses, if the reader is to turn to others")
        if responses == self._kept:
            return
        self._kept = responses
        self._rows.clear()
        wanted = [
            (incarnation, sequence)
            for incarnation, shards in self._found.items()
            for sequence, found in enumerate(shards)
            if ((found >= responses.start) & (found < responses.stop)).any()
        ]
        for place, body in zip(wanted, self._at(wanted), strict=True):
            key = layout.shard(self._iteration, *place)
            if body is None:
                raise ObjectMissing(key)
            self._keep_rows(*place, decode_shard(key, body))

    def _fetch_all(self, names: Sequence[str], shards_max: int = sys.maxsize) -> bool:
        """Fetch shards up to the first gap of each journal, at most `shards_max` of each; returns whether all were met.

        Each round asks for the next shards of every journal that is open. Decoding happens in this thread, because
        decoding threads would only block each other.
        """
        still_open, asked, window = list(dict.fromkeys(names)), 0, 1
        while still_open and asked < shards_max:
            window = min(window, max(1, self._parallel_reads // len(still_open)), shards_max - asked)
            places = [(name, self._next.get(name, 0) + ahead) for name in still_open for ahead in range(window)]
            ended: set[str] = set()
            for (name, sequence), body in zip(places, self._at(places), strict=True):
                if body is None:
                    ended.add(name)
                elif name not in ended:
                    self._keep(name, sequence, body)
            still_open = [name for name in still_open if name not in ended]
            asked += window
            window *= 2
        return not still_open

    def _at(self, places: Sequence[tuple[str, int]]) -> Iterator[bytes | None]:
        """The bodies of shards, by incarnation and number; None for one that is missing."""
        for first in range(0, len(places), 2 * self._parallel_reads):
            part = places[first : first + 2 * self._parallel_reads]
            yield from self._bodies([layout.shard(self._iteration, *place) for place in part])

    def _bodies(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) == 1 or self._parallel_reads == 1:
            return [self._body(key) for key in keys]
        with ThreadPoolExecutor(min(self._parallel_reads, len(keys))) as pool:
            return list(pool.map(self._body, keys))

    def _body(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except ObjectMissing:
            return None

    def _keep(self, incarnation: str, sequence: int, body: bytes) -> None:
        rows = decode_shard(layout.shard(self._iteration, incarnation, sequence), body)
        for row in rows:
            self._tokens[incarnation] += len(row.logprobs)
            if row.finish.ends_response:
                self._ends[row.response].append((incarnation, row.epoch, sequence))
        if self._kept is not None:
            self._found[incarnation].append(np.unique(np.array([row.response for row in rows], dtype=np.uint32)))
        self._keep_rows(incarnation, sequence, rows)
        self._next[incarnation] = sequence + 1

    def _keep_rows(self, incarnation: str, sequence: int, rows: Iterable[Row]) -> None:
        for row in rows:
            if self._kept is None:
                self._rows[incarnation, row.epoch, row.response].append((sequence, row))
            elif row.response in self._kept:
                # A copy, because a row is a view of its whole shard.
                own = replace(row, token_ids=row.token_ids.copy(), logprobs=row.logprobs.copy())
                self._rows[incarnation, row.epoch, row.response].append((sequence, own))

    def rows(self, incarnation: str, epoch: int, response: int) -> list[tuple[int, Row]]:
        """(sequence, row) of a response, in the order written; none if the rows of others are kept."""
        return self._rows.get((incarnation, epoch, response), [])
