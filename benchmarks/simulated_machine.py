"""What a simulated member runs on: an engine that takes time, straggles and hangs.

Knows no claims and no faults of the store.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.simulated_history import CONTEXT, VOCABULARY, History
from storage import journal
from storage.clock import Clock
from storage.shard import Row, decode_shard, encode_shard
from tasks.sampling.scripted_engine import ScriptedEngine


class HangingEngine(ScriptedEngine):
    """A scripted engine that stands still in its next step for `hang_s`."""

    def __init__(self, history: History, member: int, clock: Clock) -> None:
        super().__init__(
            VOCABULARY,
            history.in_flight,
            context_length=CONTEXT,
            median_length=history.median_length,
            clock=clock,
            step_time_s=lambda batch: history.speeds[member].step_s(batch) + self._hang(),
        )
        self.hang_s = 0.0

    def _hang(self) -> float:
        hang_s, self.hang_s = self.hang_s, 0.0
        return hang_s


class ShardMemory:
    """The bytes of every shard are made by the production code; a reader of the same process is given the rows again.

    That an encoded shard decodes to its rows is shown in tests/storage/test_shard.py; here it would take half the time.
    """

    def __init__(self) -> None:
        self._rows: dict[bytes, list[Row]] = {}

    def encode(self, rows: Sequence[Row]) -> bytes:
        body = encode_shard(rows)
        self._rows[body] = list(rows)
        return body

    def decode(self, key: str, body: bytes) -> list[Row]:
        return self._rows[body] if body in self._rows else decode_shard(key, body)


@contextmanager
def shards_remembered() -> Iterator[ShardMemory]:
    """Within it, all journals of this process share one memory of their shards."""
    memory, names = ShardMemory(), vars(journal)
    ours = {name: names[name] for name in ("encode_shard", "decode_shard")}
    names.update(encode_shard=memory.encode, decode_shard=memory.decode)
    try:
        yield memory
    finally:
        names.update(ours)
