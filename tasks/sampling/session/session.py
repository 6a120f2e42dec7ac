"""Session: one incarnation of one slot, from its first claim to its last flush.

A session claims its slot's responses, resumes each one at the token where its journal ends, decodes, and takes over
responses of other members when it has none left. If the engine dies, the session restarts it and continues each
response where it stopped. Bookkeeping does all storage requests. A session knows nothing of Flyte or training.
"""

import logging
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from storage.clock import Clock
from storage.prompt_table import PromptRow
from storage.records import PlanRecord
from storage.shard import Finish
from storage.store import ObjectStore, StorageError, StoreUnavailable
from tasks.planning.decode_rate import DecodeRate
from tasks.sampling.engines.engine import Engine, EngineDied, FinishReason, GenerationRequest, TokenDelta, noise_key
from tasks.sampling.session.bookkeeping import FAILURES_MAX, Bookkeeping
from tasks.sampling.session.claimant import Work
from tasks.sampling.session.holdings import Holdings
from tasks.sampling.session.session_config import SessionConfig

log = logging.getLogger(__name__)
IDLE_POLL_S_MIN, IDLE_POLL_S_MAX = 0.01, 0.25
FINISH = {None: Finish.RUNNING, FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}
Load = Callable[[Engine, Callable[[], None]], None]


class Preempted(Exception):  # noqa: N818 - not an error: the machine is taken away, and all tokens are journalled
    """A notice came; all tokens are flushed, and other members may claim all held responses at once."""


class _Closed(Exception):  # noqa: N818
    """The iteration is closed: the trainer needs no more tokens."""


@dataclass(frozen=True, kw_only=True)
class SessionOutcome:
    """What an incarnation did. engine_died: the engine is dead and must be restarted before it is used again."""

    incarnation: str
    tokens_generated: int
    tokens_recovered: int
    responses_finished: int
    engine_died: bool = False

    @classmethod
    def of_nothing(cls) -> "SessionOutcome":
        """The outcome of a process that found nothing to do and claimed nothing."""
        return cls(incarnation="", tokens_generated=0, tokens_recovered=0, responses_finished=0)


class Session:
    """Drives an engine over the responses of a slot, and of other slots that need help, until `run` returns."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        *,
        prompts: Sequence[PromptRow],
        engine: Engine,
        load: Load,
        config: SessionConfig,
        clock: Clock,
        notice: Callable[[], bool],
        incarnation: str | None = None,
        engine_died: bool = False,
        enough: Callable[[], bool] | None = None,
    ) -> None:
        """Create a session that has claimed nothing yet.

        load: gives the engine the plan's weights, once there is something to decode. It receives a function that it
        must call now and then while it waits, and which raises when waiting has become useless.
        incarnation: a name that was never used before; by default a random one.
        engine_died: the engine must be restarted before it is used.
        enough: once time_limit_s has passed, the session ends only when this returns True. Housekeeping calls it with
        every heartbeat, so it may read the store.
        """
        self.incarnation = incarnation or f"{config.slot:05d}-{uuid.uuid4().hex[:16]}"
        self._plan = plan
        self._prompts = prompts
        self._engine = engine
        self._load = load
        self._config = config
        self._clock = clock
        self._notice = notice
        self._rate = DecodeRate()
        place = plan.slots[config.slot] if config.slot < len(plan.slots) else None
        self._holdings = Holdings(
            own=frozenset(plan.responses_of(config.slot) if place else ()), batch_max=place.batch_max if place else None
        )
        self._books = Bookkeeping(
            store, plan, self.incarnation, engine, self._holdings, self._rate, config, clock, enough
        )
        self._owned_seen: dict[int, int] | None = None
        self._claimed = False
        self._pause_s = IDLE_POLL_S_MIN
        self._idle_since_s: float | None = None
        self._death = (
            "in an earlier iteration" if engine_died else None
        )  # why the engine is dead, as text: an exception would keep its frames' memory alive
        self._restarts = 0
        self._ends_s = None if config.time_limit_s is None else clock.monotonic() + config.time_limit_s

    def claim(self) -> int:
        """Claim the slot, assemble its responses from the journal, and return how many are to be extended.

        `run` calls it unless it has been called already. While the store is unavailable it is tried FAILURES_MAX times.
        Raises StoreUnavailable after the last one, and Preempted after a notice.
        """
        failures = 0
        while not self._claimed:
            if self._notice():
                self._preempted()
            try:
                self._books.claim()
                self._claimed = True
            except StoreUnavailable as error:
                failures += 1
                log.warning("slot %d: claiming failed %d times: %s", self._config.slot, failures, error)
                if failures >= FAILURES_MAX:
                    raise
                self._clock.sleep(self._books.wake_interval_s)
        if self._books.closed:
            log.info("slot %d: iteration %d is closed", self._config.slot, self._plan.iteration)
            return 0
        self._take_in()
        self._books.thread.start()
        return len(self._holdings.held)

    def run(self) -> SessionOutcome:
        """Claim the slot's responses, decode them, then help others; leave when none is left or the iteration closes.

        Raises Preempted after a notice, and EngineDied when the engine dies after engine_restarts_max restarts.
        """
        try:
            if not self._claimed:
                self.claim()
            while not self._is_done():
                self._turn()
        except Preempted:
            raise
        except Exception:
            # Tokens that a failed engine has returned are good and are flushed, unless the store itself fails.
            # The next session on this engine must find nothing in flight.
            with suppress(EngineDied):
                self._abort(self._holdings.in_flight)
            self._books.thread.abandon()
            with suppress(StorageError):
                self._books.leave()
            raise
        except BaseException:
            self._books.thread.abandon()
            raise
        self._leave()
        return self.outcome()

    def hand_over(self, responses: Collection[int]) -> None:
        """Release these responses for others once their tokens are journalled; call it in the decode loop's thread."""
        for response in responses:
            held = self._holdings.held.get(response)
            if held is not None:
                self._abort([response])
                self._books.writer.append(response, held.epoch, len(held.token_ids), (), (), Finish.RELEASED)
                self._holdings.release(response)

    def outcome(self) -> SessionOutcome:
        return SessionOutcome(
            incarnation=self.incarnation,
            tokens_generated=self._holdings.generated,
            tokens_recovered=self._books.tokens_recovered,
            responses_finished=len(self._holdings.ended),
            engine_died=self._death is not None,
        )

    def _turn(self) -> None:
        """Run one turn of the decode loop."""
        if self._notice():
            self._preempted()
        self._drop_lost()
        self._take_in()
        if self._books.cut_due:
            self._cut()
        try:
            if self._holdings.waiting:
                self._admit()
            if self._holdings.in_flight:
                self._pause_s = IDLE_POLL_S_MIN
                self._decode()
            else:
                # The first pause is short: the result of the last look is mostly there at once, and the slot may leave.
                self._clock.sleep(min(self._pause_s, self._books.wake_interval_s))
                self._pause_s = min(2 * self._pause_s, IDLE_POLL_S_MAX)
        except EngineDied as error:
            self._begin_again(error)
        self._books.thread.tick()

    def _is_done(self) -> bool:
        now_s = self._clock.monotonic()
        if self._books.closed or (self._ends_s is not None and now_s >= self._ends_s and self._books.enough):
            return True
        if self._holdings.held or self._books.inbox:
            self._idle_since_s = None
            return False
        if self._idle_since_s is None:
            self._idle_since_s = now_s
            self._books.hasten()
        return self._books.may_leave(now_s - self._idle_since_s)

    def _cut(self) -> None:
        """Release everything held: other members have room for it, and this machine is no longer worth its price."""
        log.info("slot %d: handing over its last %d responses", self._config.slot, len(self._holdings.held))
        self.hand_over(list(self._holdings.held))
        self._books.note_cut()

    def _take_in(self) -> None:
        if self._books.take_in(self._hold):
            self._owned_seen = None

    def _hold(self, work: Work) -> None:
        # A response that was lost and claimed back before this thread noticed is now held under another claim.
        self._let_go([work.response] if work.response in self._holdings.held else [])
        self._holdings.take(work)

    def _admit(self) -> None:
        holdings = self._holdings
        if self._death is not None:
            self._restarts += 1
            self._engine.restart()
            self._death = None
        if holdings.state == "loading":
            try:
                self._load(self._engine, self._heed)
            except Preempted:
                self._preempted()
            except _Closed:
                return
            holdings.state = "working"
            self._books.hasten()
        room = holdings.batch_limit(self._engine.max_responses_in_flight) - len(holdings.in_flight)
        responses = [holdings.waiting.popleft() for _ in range(min(room, len(holdings.waiting)))]
        if responses:
            self._engine.start([self._request(response) for response in responses])
            holdings.in_flight.update(responses)

    def _heed(self) -> None:
        if self._notice():
            raise Preempted
        if self._books.closed:
            raise _Closed

    def _request(self, response: int) -> GenerationRequest:
        group = response // self._plan.num_generations
        return GenerationRequest(
            response,
            group,
            self._prompts[group].token_ids,
            tuple(self._holdings.held[response].token_ids),
            noise_key(self._plan.run_seed, self._plan.iteration, response),
            self._plan.sampling,
        )

    def _decode(self) -> None:
        batch, began_s = len(self._holdings.in_flight), self._clock.monotonic()
        deltas = self._engine.step()
        tokens = sum(len(delta.token_ids) for delta in deltas)
        self._rate.record(batch, self._clock.monotonic() - began_s, tokens)
        for delta in deltas:
            self._record(delta)

    def _record(self, delta: TokenDelta) -> None:
        held = self._holdings.held[delta.response]
        finish = FINISH[delta.finish_reason]
        start = len(held.token_ids)
        self._books.writer.append(delta.response, held.epoch, start, delta.token_ids, delta.logprobs, finish)
        held.token_ids += delta.token_ids
        self._holdings.generated += len(delta.token_ids)
        if finish.ends_response:
            self._holdings.end(delta.response)

    def _drop_lost(self) -> None:
        """Stop extending responses that another member has claimed meanwhile: our new tokens for them do not count."""
        owned, holdings = self._books.owned, self._holdings
        if owned is self._owned_seen:
            return
        self._owned_seen = owned
        for response in [r for r, epoch in holdings.released.items() if owned.get(r) != epoch]:
            del holdings.released[response]
        lost = [response for response, held in holdings.held.items() if owned.get(response) != held.epoch]
        if lost:
            log.info("slot %d: %d responses were claimed by another member", self._config.slot, len(lost))
            self._let_go(lost)

    def _let_go(self, responses: Collection[int]) -> None:
        if responses:
            self._books.writer.drop(responses)
            self._abort(responses)
            self._holdings.let_go(responses)

    def _abort(self, responses: Collection[int]) -> None:
        """Have the engine forget those of these responses that are in flight; a dead engine has none in flight."""
        in_flight = sorted(self._holdings.in_flight.intersection(responses))
        if in_flight:
            try:
                self._engine.abort(in_flight)
            except EngineDied as error:
                self._begin_again(error)

    def _begin_again(self, error: EngineDied) -> None:
        """Queue the responses of a dead engine again; raises EngineDied after engine_restarts_max restarts."""
        self._death = " ".join(str(error).split())
        self._holdings.begin_again()
        tried = f"{self._restarts} of {self._config.engine_restarts_max} restarts tried"
        log.warning("slot %d: the engine died, %s: %s", self._config.slot, tried, self._death)
        if self._restarts >= self._config.engine_restarts_max:
            raise EngineDied(f"the engine died, {tried}: {self._death}") from error
        self._books.hasten()

    def _preempted(self) -> None:
        """Flush and release everything, then raise Preempted, even if the store fails: the machine is lost anyway."""
        try:
            self._leave()
        except StorageError as error:
            log.warning("slot %d: not everything could be handed over in time: %s", self._config.slot, error)
        raise Preempted

    def _leave(self) -> None:
        with suppress(EngineDied):
            self._abort(self._holdings.in_flight)
        if self._books.closed:
            self._books.inbox.clear()
            with suppress(EngineDied):
                self._let_go(list(self._holdings.held))
        self._books.leave()
