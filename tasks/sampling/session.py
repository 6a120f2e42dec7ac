"""Session: one incarnation of one slot, from its first claim to its last flush.

Claims its slot's responses, resumes each at the token where the journal ends, decodes, journals off the decode path,
and takes over others' work when it has none. Knows nothing of Flyte, of the engine's insides, or of what the tokens
are for.
"""

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from storage.clock import Clock
from storage.journal import PARALLEL_READS, JournalWriter
from storage.prompt_table import PromptRow
from storage.records import PlanRecord
from storage.shard import Finish
from storage.store import ObjectStore, StorageError, StoreUnavailable
from tasks.planning.decode_rate import DecodeRate
from tasks.planning.rebalance import Seeker
from tasks.sampling.claimant import Claimant, Work
from tasks.sampling.engine import Engine, FinishReason, GenerationRequest, TokenDelta, noise_key
from tasks.sampling.heartbeat import Heartbeat, Load
from tasks.sampling.housekeeping import Housekeeping
from tasks.sampling.session_config import SessionConfig

log = logging.getLogger(__name__)
FAILURES_MAX = 5
IDLE_POLL_S_MAX = 0.25
FINISH = {None: Finish.RUNNING, FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}


class Preempted(Exception):  # noqa: N818 - not an error: the machine is wanted back, and everything is journalled
    """The notice came; all tokens are flushed and everything held may be claimed at once."""


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
    """Drives an engine over the responses of a slot, and of others that need help. `run` returns when it is done."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        *,
        prompts: Sequence[PromptRow],
        engine: Engine,
        load: Callable[[Engine], None],
        config: SessionConfig,
        clock: Clock,
        notice: Callable[[], bool],
        incarnation: str | None = None,
    ) -> None:
        """load: gives the engine the plan's weights, or raises Preempted; called once there is something to decode.

        incarnation: a name that was never used before; by default a random one.
        """
        self.incarnation = incarnation or f"{config.slot:05d}-{uuid.uuid4().hex[:16]}"
        self._plan = plan
        self._prompts = prompts
        self._engine = engine
        self._load = load
        self._config = config
        self._clock = clock
        self._notice = notice
        self._claimant = Claimant(
            store,
            plan,
            incarnation=self.incarnation,
            slot=config.slot,
            claim_ttl_s=config.claim_ttl_s,
            clock=clock,
            parallel_reads=PARALLEL_READS if config.background else 1,
        )
        self._writer = JournalWriter(store, plan.iteration, self.incarnation, plan.weight_version)
        self._heartbeat = Heartbeat(store, plan.iteration, self.incarnation, engine, config, clock)
        self._rate = DecodeRate()
        self._held: dict[int, _Held] = {}
        self._waiting: deque[int] = deque()
        self._in_flight: set[int] = set()
        # Response -> epoch of the claim under which it was released or ended.
        self._released: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._state: Literal["loading", "working", "gone"] = "loading"
        self._generated = self._ends = self._ends_journalled = 0
        # What the housekeeping thread hands to the decode loop.
        self._inbox: deque[Work] = deque()
        self._owned: dict[int, int] = {}
        self._owned_seen: dict[int, int] | None = None
        self._released_journalled: dict[int, int] = {}
        self._claimed = self._closed = self._leaving = self._own_ended = False
        self._seeking = threading.Lock()
        self._wake_interval_s = min(config.flush_interval_s, config.heartbeat_interval_s)
        self._keeping = Housekeeping(self.keep, clock, interval_s=self._wake_interval_s, background=config.background)
        self._failures = {"flush": 0, "heartbeat": 0, "look": 0}
        now_s = clock.monotonic()
        self._next_flush_s = now_s + config.flush_interval_s
        self._next_beat_s = now_s + config.heartbeat_interval_s
        self._next_look_s = now_s
        self._idle_since_s: float | None = None
        self._ends_s = None if config.time_limit_s is None else now_s + config.time_limit_s

    def claim(self) -> int:
        """Take over the slot and what its journal holds; the number of responses to extend. Done once, by `run` too."""
        self._claimed = True
        self._closed = self._claimant.closed()
        if self._closed:
            log.info("slot %d: iteration %d is closed", self._config.slot, self._plan.iteration)
            return 0
        self._announce()
        self._take_in(self._claimant.take_own_slot())
        self._owned = self._claimant.owned()
        if not self._held:
            self._look()
        self._keeping.start()
        return len(self._held)

    def run(self) -> SessionOutcome:
        """Claim the slot's work, decode it, then help others; leave when nothing is left, or the iteration is closed.

        Raises Preempted after a notice.
        """
        if not self._claimed and not self.claim() and self._closed:
            return self.outcome()
        try:
            while not self._is_done():
                self._turn()
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
        self._leave()
        return self.outcome()

    def hand_over(self, responses: Collection[int]) -> None:
        """Let anybody claim these responses as soon as their tokens are journalled; for the decode loop's thread."""
        for response in responses:
            held = self._held.get(response)
            if held is not None:
                self._writer.append(response, held.epoch, held.length, (), (), Finish.RELEASED)
                self._released[response] = held.epoch
                del self._held[response]
        self._forget(self._released)

    def outcome(self) -> SessionOutcome:
        return SessionOutcome(
            incarnation=self.incarnation,
            tokens_generated=self._generated,
            tokens_recovered=self._claimant.tokens_recovered,
            responses_finished=len(self._ended),
        )

    def keep(self) -> None:
        """Flush, beat, notice what others have claimed, and look for work. Runs beside the decode loop.

        What would be late at the next wake-up is done now. What the store does not answer is tried again at the next
        wake-up, FAILURES_MAX times in a row; no duty keeps another from being done.
        """
        soon_s = self._clock.monotonic() + self._wake_interval_s
        if soon_s > self._next_flush_s:
            self._next_flush_s = soon_s - self._wake_interval_s + self._config.flush_interval_s
            self._attempt("flush", self._flush)
        if soon_s > self._next_beat_s:
            self._next_beat_s = soon_s - self._wake_interval_s + self._config.heartbeat_interval_s
            self._attempt("heartbeat", self._announce)
        if self._room() > 0 and soon_s > self._next_look_s:
            self._next_look_s = soon_s - self._wake_interval_s + self._config.heartbeat_interval_s
            self._attempt("look", self._look)

    def _turn(self) -> None:
        """One turn of the decode loop."""
        if self._notice():
            self._leave()
            raise Preempted
        self._drop_lost()
        # Not while a look is under way: it must know of everything that was handed out before.
        if self._inbox and self._seeking.acquire(blocking=False):
            try:
                self._take_in([self._inbox.popleft() for _ in range(len(self._inbox))])
            finally:
                self._seeking.release()
        self._admit()
        if self._in_flight:
            self._decode()
        else:
            self._clock.sleep(min(IDLE_POLL_S_MAX, self._wake_interval_s))
        self._keeping.tick()

    def _is_done(self) -> bool:
        now_s = self._clock.monotonic()
        if self._closed or (self._ends_s is not None and now_s >= self._ends_s):
            return True
        if self._held or self._inbox:
            self._idle_since_s = None
            return False
        if self._idle_since_s is None:
            self._idle_since_s = now_s
            self._hasten(now_s)
        patient = now_s - self._idle_since_s < self._config.idle_timeout_s
        if self._released or (not self._claimant.nothing_left and (patient or not self._own_ended)):
            return False
        with self._seeking:  # a look that is under way may still bring work
            self._leaving = not self._inbox
        return self._leaving

    def _hasten(self, now_s: float) -> None:
        """Tell the others at once that there is nothing left here, and look for work."""
        self._next_flush_s = self._next_beat_s = self._next_look_s = now_s
        self._keeping.wake()

    def _flush(self) -> None:
        ends, released = self._ends, dict(self._released)
        self._writer.flush()
        self._ends_journalled, self._released_journalled = ends, released
        if self._claimant.probe([*self._held, *self._released]):
            self._owned = self._claimant.owned()
        self._closed = self._closed or self._claimant.closed()

    def _look(self) -> None:
        """Seek work; what is found waits in the inbox for the decode loop."""
        with self._seeking:
            if self._leaving:
                return
            self._flush()
            if self._closed:
                return
            self._own_ended = self._own_ended or self._claimant.own_unit_ended()
            if not self._config.idle_timeout_s and (self._held or (self._own_ended and not self._released)):
                return
            per_response = self._rate.per_response(self._engine.max_responses_in_flight)
            seeker = Seeker(room=self._room(), running=len(self._in_flight), tokens_per_s=per_response)
            held = {response: held.epoch for response, held in list(self._held.items())}
            released = self._released_journalled.items() & self._owned.items()
            work = self._claimant.seek(seeker, {**self._ended, **self._released, **held}, len(released))
            self._owned = self._claimant.owned()
            self._inbox.extend(work)

    def _room(self) -> int:
        """How many more responses could be begun now; none while some of our own still wait."""
        if self._waiting or self._inbox:
            return 0
        return self._engine.max_responses_in_flight - len(self._in_flight)

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

    def _take_in(self, work: Sequence[Work]) -> None:
        # What was lost and won back before this thread looked is held under another claim now.
        self._let_go([item.response for item in work if item.response in self._held])
        for item in work:
            self._held[item.response] = _Held(item.epoch, item.prefix, len(item.prefix))
            self._released.pop(item.response, None)
            self._waiting.append(item.response)

    def _admit(self) -> None:
        if self._waiting and self._state == "loading":
            try:
                self._load(self._engine)
            except Preempted:
                self._leave()
                raise
            self._state = "working"
            self._next_beat_s = self._clock.monotonic()
            self._keeping.wake()
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

    def _decode(self) -> None:
        batch, began_s = len(self._in_flight), self._clock.monotonic()
        deltas = self._engine.step()
        self._rate.record(batch, self._clock.monotonic() - began_s)
        for delta in deltas:
            self._record(delta)

    def _record(self, delta: TokenDelta) -> None:
        held = self._held[delta.response]
        finish = FINISH[delta.finish_reason]
        self._writer.append(delta.response, held.epoch, held.length, delta.token_ids, delta.logprobs, finish)
        held.length += len(delta.token_ids)
        self._generated += len(delta.token_ids)
        if finish.ends_response:
            self._ended[delta.response] = held.epoch
            self._ends += 1
            self._in_flight.discard(delta.response)
            del self._held[delta.response]

    def _drop_lost(self) -> None:
        """Stop extending what somebody else has claimed in the meantime: our tokens for it are void."""
        owned = self._owned
        if owned is self._owned_seen:
            return
        self._owned_seen = owned
        for response in [r for r, epoch in self._released.items() if owned.get(r) != epoch]:
            del self._released[response]
        lost = [response for response, held in self._held.items() if owned.get(response) != held.epoch]
        if lost:
            log.info("slot %d: %d responses were claimed by another member", self._config.slot, len(lost))
            self._let_go(lost)

    def _let_go(self, responses: Collection[int]) -> None:
        self._writer.drop(responses)
        for response in responses:
            del self._held[response]
        self._forget(responses)

    def _forget(self, responses: Collection[int]) -> None:
        """Take responses out of the engine and of the queue before it."""
        self._engine.abort(sorted(self._in_flight.intersection(responses)))
        self._in_flight.difference_update(responses)
        self._waiting = deque(response for response in self._waiting if response not in responses)

    def _leave(self) -> None:
        """Flush everything and hand over whatever is still held: "gone" lets others claim it without waiting."""
        self._engine.abort(sorted(self._in_flight))
        self._keeping.stop()
        self._writer.flush()
        self._ends_journalled = self._ends
        self._state = "gone"
        self._announce()

    def _announce(self) -> None:
        self._heartbeat.beat(
            Load(
                state=self._state,
                tokens_generated=self._generated,
                tokens_recovered=self._claimant.tokens_recovered,
                responses_finished=len(self._ended),
                claims=self._claimant.claims_made(),
                unfinished=len(self._held) + len(self._released) + self._ends - self._ends_journalled,
                running=len(self._in_flight),
                waiting=len(self._waiting) + len(self._inbox),
                released=len(self._released_journalled.items() & self._released.items()),
                plateau=self._rate.plateau(),
            )
        )
