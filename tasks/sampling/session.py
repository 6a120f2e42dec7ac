"""Session: one incarnation of one slot, from its first claim to its last flush.

Claims its slot's responses, resumes each at the token where the journal ends, decodes, and journals off the decode
path. Knows nothing of Flyte, of the engine's insides, or of what the tokens are for.
"""

import logging
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from storage import layout, records
from storage.assembly import JournalReader
from storage.claims import take_over
from storage.clock import Clock
from storage.journal import JournalWriter
from storage.prompt_table import PromptRow
from storage.records import AliveRecord, PlanRecord
from storage.shard import Finish
from storage.store import ObjectStore, StorageError, StoreUnavailable
from tasks.sampling.engine import Engine, FinishReason, GenerationRequest, TokenDelta, noise_key
from tasks.sampling.housekeeping import Housekeeping

log = logging.getLogger(__name__)
FAILURES_MAX = 5
FINISH = {None: Finish.RUNNING, FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}


class Preempted(Exception):  # noqa: N818 - not an error: the machine is wanted back, and everything is journalled
    """The notice came; all tokens are flushed and everything held may be claimed at once."""


class SlotTaken(Exception):  # noqa: N818 - reads as what happened
    """Another incarnation of this slot claimed responses that have not ended; if it dies, somebody must come again."""


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Intervals and names of one incarnation; see RolloutConfig for their meaning.

    started_at_s: since when its machine is paid for, on this machine's wall clock; None: since now.
    """

    slot: int
    pool: str
    host: str
    pid: int
    started_at_s: float | None = None
    flush_interval_s: float
    heartbeat_interval_s: float
    background: bool = True


@dataclass(slots=True)
class _Held:
    """A response this incarnation may extend."""

    epoch: int
    prefix: tuple[int, ...]
    length: int


@dataclass(frozen=True, kw_only=True)
class SessionOutcome:
    incarnation: str
    tokens_generated: int
    tokens_recovered: int
    responses_finished: int


class Session:
    """Drives an engine over the responses of a slot. `run` returns when all of them have ended."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        *,
        prompts: Sequence[PromptRow],
        engine: Engine,
        config: SessionConfig,
        clock: Clock,
        notice: Callable[[], bool],
    ) -> None:
        self.incarnation = f"{config.slot:05d}-{uuid.uuid4().hex[:16]}"
        self._store = store
        self._plan = plan
        self._prompts = prompts
        self._engine = engine
        self._config = config
        self._clock = clock
        self._notice = notice
        self._reader = JournalReader(store, plan)
        self._writer = JournalWriter(store, plan.iteration, self.incarnation, plan.weight_version)
        self._held: dict[int, _Held] = {}
        self._waiting: deque[int] = deque()
        self._in_flight: set[int] = set()
        self._taken: set[int] = set()
        self._state: Literal["loading", "working", "gone"] = "loading"
        self._started_at_s = clock.wall() if config.started_at_s is None else config.started_at_s
        self._beat = 0
        self._claims_changed = False
        self._generated = self._recovered = self._finished = 0
        interval_s = min(config.flush_interval_s, config.heartbeat_interval_s)
        self._keeping = Housekeeping(self.keep, clock, interval_s=interval_s, background=config.background)
        self._wake_interval_s = interval_s
        self._failures = {"flush": 0, "heartbeat": 0}
        self._next_flush_s = clock.monotonic() + config.flush_interval_s
        self._next_beat_s = clock.monotonic() + config.heartbeat_interval_s

    def claim(self) -> int:
        """Take over the slot and what its journal holds; the number of responses still to be extended."""
        self._announce()
        self._reader.refresh()
        book, slot = self._reader.book, self._config.slot
        for unit in range(len(self._plan.slots)):
            while True:
                mine = {owner.incarnation for owner in book.owners_of(unit) if owner.slot == slot}
                if not mine and (unit != slot or book.epoch(unit) > 0):
                    break  # nothing of this unit is ours to take, or the slot's work has all been taken by others
                if take_over(
                    self._store,
                    self._plan,
                    book,
                    self._reader.shards,
                    unit=unit,
                    incarnation=self.incarnation,
                    slot=slot,
                    predecessors=mine,
                ):
                    break
        order = {response: place for place, response in enumerate(self._plan.responses_of(slot))}
        for response in sorted(book.held_by(self.incarnation), key=lambda r: (order.get(r, len(order)), r)):
            self._hold(response)
        self._keeping.start()
        return len(self._held)

    def load_weights(self, load: Callable[[Engine], None]) -> None:
        """Load the plan's weight version; skipped when the journal already holds all that the slot was asked for."""
        if self._held:
            try:
                load(self._engine)
            except BaseException:
                self._keeping.abandon()
                raise

    def run(self) -> SessionOutcome:
        """Decode until every response held has ended.

        Raises Preempted after a notice, and SlotTaken when another incarnation of the slot has unfinished work of it.
        """
        self._state = "working"
        self._announce()
        try:
            while self._waiting or self._in_flight:
                self._heed_notice()
                self._drop_lost()
                self._admit()
                for delta in self._engine.step():
                    self._record(delta)
                self._keeping.tick()
        except Preempted:
            raise
        except Exception:
            # An engine that failed has still decoded what it handed over; only the store's own failure loses that.
            self._keeping.abandon()
            with suppress(StorageError):
                self._writer.flush()
            raise
        except BaseException:
            self._keeping.abandon()
            raise
        self.leave()
        self._check_taken()
        return self.outcome()

    def leave(self) -> None:
        """Flush everything and hand over whatever is still held: "gone" lets others claim it without waiting."""
        self._keeping.stop()
        self._writer.flush()
        self._state = "gone"
        self._announce()

    def _heed_notice(self) -> None:
        if self._notice():
            self.leave()
            raise Preempted

    def outcome(self) -> SessionOutcome:
        return SessionOutcome(
            incarnation=self.incarnation,
            tokens_generated=self._generated,
            tokens_recovered=self._recovered,
            responses_finished=self._finished,
        )

    def keep(self) -> None:
        """Flush and beat, and notice claims of others on what is held. Runs beside the decode loop.

        What would be late at the next wake-up is done now. A flush or a beat that the store does not answer is tried
        again at the next wake-up, FAILURES_MAX times in a row; neither keeps the other from being done.
        """
        now = self._clock.monotonic()
        if now + self._wake_interval_s > self._next_flush_s:
            self._next_flush_s = now + self._config.flush_interval_s
            self._attempt("flush", self._flush)
        if now + self._wake_interval_s > self._next_beat_s:
            self._next_beat_s = now + self._config.heartbeat_interval_s
            self._attempt("heartbeat", self._announce)

    def _flush(self) -> None:
        self._writer.flush()
        if self._reader.book.probe(self._config.slot):
            self._claims_changed = True

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except StoreUnavailable as error:
            self._failures[name] += 1
            log.warning("slot %d: %s failed %d times: %s", self._config.slot, name, self._failures[name], error)
            if self._failures[name] >= FAILURES_MAX:
                raise
        else:
            self._failures[name] = 0

    def _hold(self, response: int) -> None:
        assembled = self._reader.assemble(response)
        self._recovered += len(assembled.token_ids)
        if assembled.finish.ends_response:
            return
        owner = self._reader.book.owner(response)
        if owner is None:
            raise RuntimeError(f"response {response} is held without a claim")
        prefix = tuple(int(token) for token in assembled.token_ids)
        self._held[response] = _Held(owner.epoch, prefix, len(prefix))
        self._waiting.append(response)

    def _admit(self) -> None:
        room = self._engine.max_responses_in_flight - len(self._in_flight)
        responses = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if responses:
            self._engine.start([self._request(response) for response in responses])
            self._in_flight.update(responses)

    def _request(self, response: int) -> GenerationRequest:
        group = response // self._plan.num_generations
        return GenerationRequest(
            response,
            group,
            self._prompts[group].token_ids,
            self._held[response].prefix,
            noise_key(self._plan.run_seed, self._plan.iteration, response),
            self._plan.sampling,
        )

    def _record(self, delta: TokenDelta) -> None:
        held = self._held[delta.response]
        finish = FINISH[delta.finish_reason]
        self._writer.append(delta.response, held.epoch, held.length, delta.token_ids, delta.logprobs, finish)
        held.length += len(delta.token_ids)
        self._generated += len(delta.token_ids)
        if finish.ends_response:
            self._finished += 1
            self._in_flight.discard(delta.response)
            del self._held[delta.response]

    def _drop_lost(self) -> None:
        """Stop extending what somebody else has claimed in the meantime: our tokens for it are void."""
        if not self._claims_changed:
            return
        self._claims_changed = False
        book = self._reader.book
        lost = {r for r in self._held if (owner := book.owner(r)) is None or owner.incarnation != self.incarnation}
        if lost:
            log.warning("slot %d: %d responses were claimed by another worker", self._config.slot, len(lost))
        self._engine.abort(sorted(lost & self._in_flight))
        self._writer.drop(lost)
        self._in_flight -= lost
        self._waiting = deque(response for response in self._waiting if response not in lost)
        for response in lost:
            owner = book.owner(response)
            if owner is not None and owner.slot == self._config.slot:
                self._taken.add(response)
            del self._held[response]

    def _check_taken(self) -> None:
        if not self._taken:
            return
        self._reader.refresh()
        unfinished = [response for response in self._taken if not self._reader.assemble(response).finish.ends_response]
        if unfinished:
            names = {owner.incarnation for owner in self._reader.book.owners_of(self._config.slot)}
            raise SlotTaken(
                f"slot {self._config.slot}: {len(unfinished)} responses are with {', '.join(sorted(names))}"
            )

    def _announce(self) -> None:
        self._beat += 1
        record = AliveRecord(
            incarnation=self.incarnation,
            slot=self._config.slot,
            state=self._state,
            beat=self._beat,
            pool=self._config.pool,
            host=self._config.host,
            pid=self._config.pid,
            started_at_s=self._started_at_s,
            updated_at_s=self._clock.wall(),
            tokens_generated=self._generated,
            tokens_recovered=self._recovered,
            prefill_tokens=self._engine.prefill_tokens,
            responses_finished=self._finished,
            engine=self._engine.name,
            batch_invariant=self._engine.batch_invariant,
        )
        self._store.put(layout.alive(self._plan.iteration, self.incarnation), records.encode(record))
