"""HeartbeatWriter: an incarnation's report about itself, which overwrites one object at an interval.

A heartbeat tells the crew that the incarnation lives, how much it holds and how fast it decodes. The heartbeat is a
hint: no token counts because of a heartbeat.
"""

from collections import deque
from dataclasses import asdict, dataclass
from typing import Literal

from storage.clock import Clock
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.stores.metered import requests_of
from storage.stores.store import ObjectStore
from tasks.sampling.engines.engine import Engine
from tasks.sampling.session.session_config import SessionConfig


@dataclass(frozen=True, kw_only=True)
class HeartbeatState:
    """The part of a heartbeat that changes; the fields are those of HeartbeatRecord."""

    state: Literal["loading", "working", "gone"]
    tokens_generated: int
    tokens_recovered: int
    responses_finished: int
    claims: int
    unfinished: int
    running: int
    waiting: int
    acting: int
    released: int
    plateau: int
    room: int
    working_at_s: float | None
    decode_s: float
    step_s: tuple[tuple[int, float], ...]


class HeartbeatWriter:
    """Writes HeartbeatRecords, one at a time, with the counts of requests if `store` is metered."""

    def __init__(
        self, store: ObjectStore, iteration: int, incarnation: str, engine: Engine, config: SessionConfig, clock: Clock
    ) -> None:
        self._store = store
        self._key = layout.alive(iteration, incarnation)
        self._incarnation = incarnation
        self._engine = engine
        self._config = config
        self._clock = clock
        self._started_at_s = clock.wall() if config.started_at_s is None else config.started_at_s
        self._prefill_before = engine.prefill_tokens
        self._beats = 0
        # At each heartbeat: when, tokens until then, and seconds of all running responses until then.
        self._decoded: deque[tuple[float, int, float]] = deque()
        self._running = 0

    def beat(self, heartbeat_state: HeartbeatState) -> None:
        """Overwrite the heartbeat."""
        self._beats += 1
        requests = requests_of(self._store)
        record = HeartbeatRecord(
            incarnation=self._incarnation,
            slot=self._config.slot,
            beat=self._beats,
            pool=self._config.pool,
            host=self._config.host,
            pid=self._config.pid,
            started_at_s=self._started_at_s,
            updated_at_s=self._clock.wall(),
            prefill_tokens=self._engine.prefill_tokens - self._prefill_before,
            engine=self._engine.name,
            batch_invariant=self._engine.batch_invariant,
            tokens_per_s=self._tokens_per_s(heartbeat_state),
            usd_per_hour=self._config.usd_per_hour,
            puts=requests.puts,
            gets=requests.gets,
            bytes_read=requests.bytes_read,
            **asdict(heartbeat_state),
        )
        records.put(self._store, self._key, record)

    def _tokens_per_s(self, heartbeat_state: HeartbeatState) -> float | None:
        """The running responses' decode rate, from a response's mean rate over the last `claim_ttl_s`.

        None until the engine has decoded for half of that without a pause: over a shorter time, a long prefill would
        look as if the member had stopped. Tokens are divided by the responses of their time: tokens of a batch that has
        shrunk are not the pace of the few responses that are left.
        """
        if not heartbeat_state.running:
            self._decoded.clear()
            return None
        now_s, ttl_s = self._clock.monotonic(), self._config.claim_ttl_s
        last_s, _, spent_s = self._decoded[-1] if self._decoded else (now_s, 0, 0.0)
        spent_s += (now_s - last_s) * (self._running + heartbeat_state.running) / 2
        self._running = heartbeat_state.running
        while self._decoded and now_s - self._decoded[0][0] > ttl_s:
            self._decoded.popleft()
        self._decoded.append((now_s, heartbeat_state.tokens_generated, spent_s))
        first_s, before, spent_before_s = self._decoded[0]
        if now_s - first_s < ttl_s / 2:
            return None
        return (heartbeat_state.tokens_generated - before) / (spent_s - spent_before_s) * heartbeat_state.running
