"""Bookkeeping: all storage requests of an incarnation while it decodes, made in the housekeeping thread.

It flushes the journal, writes heartbeats, notices what other members have claimed, and looks for work when there is
room. The decode loop reads the results from attributes, so storage never waits for the engine, nor the engine for
storage.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from storage.clock import Clock
from storage.journal import JournalWriter
from storage.records import PlanRecord
from storage.store import ObjectStore, StoreUnavailable
from tasks.planning.decode_rate import DecodeRate
from tasks.planning.rebalance import Seeker, should_cut
from tasks.sampling.engines.engine import Engine
from tasks.sampling.session.claimant import Claimant, Work
from tasks.sampling.session.heartbeat import Heartbeat, Load
from tasks.sampling.session.holdings import Holdings
from tasks.sampling.session.housekeeping import Housekeeping
from tasks.sampling.session.session_config import SessionConfig

log = logging.getLogger(__name__)
FAILURES_MAX = 5


class Bookkeeping:
    """Storage for one incarnation. The loop may read owned, closed, enough, leaving, inbox and cut_due at any time."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        incarnation: str,
        engine: Engine,
        holdings: Holdings,
        rate: DecodeRate,
        config: SessionConfig,
        clock: Clock,
        is_enough: Callable[[], bool] | None = None,
    ) -> None:
        """is_enough: called with every heartbeat; `enough` is its last answer, or True if there is no such function."""
        self._is_enough = is_enough
        self.enough = is_enough is None
        self._incarnation = incarnation
        self._engine = engine
        self._holdings = holdings
        self._rate = rate
        self._config = config
        self._clock = clock
        self._claimant = Claimant(
            store,
            plan,
            incarnation=incarnation,
            slot=config.slot,
            claim_ttl_s=config.claim_ttl_s,
            clock=clock,
            parallel_reads=config.parallel_reads,
        )
        self.writer = JournalWriter(store, plan.iteration, incarnation, plan.weight_version)
        self._heartbeat = Heartbeat(store, plan.iteration, incarnation, engine, config, clock)
        self._helps_only = config.slot >= len(plan.slots)
        self._may_always_go = self._helps_only or config.time_limit_s is not None
        self.announced = self.closed = self.leaving = self._wants_cut = False
        self._cut_at_s: float | None = None
        self.owned: dict[int, int] = {}
        self.inbox: deque[Work] = deque()
        self._own_ended = self._may_always_go
        self._working_at_s: float | None = None
        self._seeking = threading.Lock()
        self._owned_version = -1
        self._claims_handed_out = 0
        self._looks_asked = self._looks_answered = 0
        self._ends_journalled = 0
        self._released_journalled: dict[int, int] = {}
        self.wake_interval_s = min(config.flush_interval_s, config.heartbeat_interval_s)
        self.thread = Housekeeping(self.keep, clock, interval_s=self.wake_interval_s, background=config.background)
        self._failures = {"flush": 0, "heartbeat": 0, "look": 0, "watch": 0}
        now_s = clock.monotonic()
        self._next_flush_s = now_s + config.flush_interval_s
        self._next_beat_s = now_s + config.heartbeat_interval_s
        self._next_look_s = now_s

    @property
    def tokens_recovered(self) -> int:
        return self._claimant.tokens_recovered

    def claim(self) -> None:
        """Claim the slot and put its responses into the inbox, or set `closed`. After a failure, call it again."""
        self.closed = self._claimant.closed()
        if self.closed:
            return
        self.announce()
        self.announced = True
        work = self._claimant.take_own_slot()
        self._renew_owned()
        self.inbox.extend(work)
        self._claims_handed_out = self._claimant.claims_made()
        if not self.inbox:
            self._attempt("look", self.look)

    def take_in(self, hold: Callable[[Work], None]) -> bool:
        """Pass what a look has found to `hold`; False when there is nothing, or while another look is under way.

        The inbox is not emptied during a look, because a look must know of everything handed out before it.
        """
        if not self.inbox or not self._seeking.acquire(blocking=False):
            return False
        try:
            for item in list(self.inbox):
                hold(item)
            self.inbox.clear()
        finally:
            self._seeking.release()
        return True

    def may_leave(self, idle_s: float) -> bool:
        """Whether a loop that has had no response for `idle_s` may end; if True, no later look brings work."""
        waits_s = 0.0 if self._config.objective == "gpu_seconds" else self._config.idle_timeout_s
        impatient = idle_s >= waits_s and self._own_ended
        looked = self._looks_answered == self._looks_asked  # a look after the last end: other members' claims are known
        if not looked or self._holdings.released or not (self._claimant.nothing_left or impatient):
            return False
        if not self._seeking.acquire(blocking=False):
            return False  # a look that is under way may still bring work
        try:
            self.leaving = not self.inbox
        finally:
            self._seeking.release()
        return self.leaving

    @property
    def cut_due(self) -> bool:
        """Whether the loop is to release everything it holds and then call `note_cut`; at most once per session."""
        return self._wants_cut and self._cut_at_s is None

    def note_cut(self) -> None:
        """Note that everything was released; for claim_ttl_s only other members take it."""
        self._cut_at_s = self._clock.monotonic()
        self.hasten()

    def hasten(self) -> None:
        """Have a flush, a heartbeat and a look done now, because there is news or nothing left to do."""
        if self._working_at_s is None and self._holdings.state == "working":
            self._working_at_s = self._clock.wall()
        self._looks_asked += 1
        self._next_flush_s = self._next_beat_s = self._next_look_s = self._clock.monotonic()
        self.thread.wake()

    def keep(self) -> None:
        """Do all duties that are due, and those that would be late at the next wake-up.

        A duty that fails because the store is unavailable does not keep the others from being done. It is tried again
        when it is next due; the FAILURES_MAX-th failure in a row raises.
        """
        now_s = self._clock.monotonic()
        if now_s + self.wake_interval_s > self._next_flush_s:
            self._next_flush_s = now_s + self._config.flush_interval_s
            self._attempt("flush", self.flush)
        if now_s + self.wake_interval_s > self._next_beat_s:
            self._next_beat_s = now_s + self._config.heartbeat_interval_s
            self._attempt("heartbeat", self.announce)
            self._attempt("watch", self._ask)
        if (self._room() > 0 or self._awaits_takers()) and now_s + self.wake_interval_s > self._next_look_s:
            self._next_look_s = now_s + self._config.heartbeat_interval_s
            self._attempt("look", self.look)

    def _ask(self) -> None:
        if self._is_enough is not None:
            self.enough = self._is_enough()

    def flush(self) -> None:
        """Write pending tokens; then read others' claims on held responses, and whether the iteration is closed."""
        ends, released = self._holdings.ends, dict(self._holdings.released)
        self.writer.flush()
        self._ends_journalled, self._released_journalled = ends, released
        try:
            self._claimant.probe([*self._holdings.held, *released])
        finally:
            self._renew_owned()
        self.closed = self.closed or self._claimant.closed()

    def look(self) -> None:
        """Look for work and put it into the inbox for the decode loop."""
        with self._seeking:
            if self.leaving:
                return
            asked = self._looks_asked
            self.flush()
            if self.closed:
                return
            try:
                self._seek()
            finally:
                self._renew_owned()
            self._looks_answered = asked

    def leave(self) -> None:
        """Write everything and release what is still held: the state "gone" lets others claim it without waiting."""
        if not self.announced:
            return
        self._claimant.stopping = True
        self.thread.abandon()
        self.writer.flush()
        self.thread.stop()
        self.writer.flush()
        self._ends_journalled = self._holdings.ends
        self._holdings.state = "gone"
        self.announce()

    def announce(self) -> None:
        holdings, waiting = self._holdings, len(self.inbox)
        unjournalled = holdings.ends - self._ends_journalled
        self._heartbeat.beat(
            Load(
                state=holdings.state,
                tokens_generated=holdings.generated,
                tokens_recovered=self._claimant.tokens_recovered,
                responses_finished=len(holdings.ended),
                claims=self._claims_handed_out,
                unfinished=waiting + len(holdings.held) + len(holdings.released) + unjournalled,
                running=len(holdings.in_flight),
                waiting=waiting + len(holdings.waiting),
                released=len(self._released_journalled.items() & holdings.released.items()),
                plateau=self._rate.plateau(),
                room=self._room(),
                working_at_s=self._working_at_s,
                decode_s=self._rate.total_s,
                step_s=self._rate.points(),
            )
        )

    def _seek(self) -> None:
        holdings = self._holdings
        self._claimant.refresh()
        cuts, has_cut = self._config.cut_share is not None, self._cut_at_s is not None
        # Other members may claim released responses before the next look.
        self._own_ended = self._may_always_go or (
            not holdings.released and self._claimant.own_unit_ended(cuts=cuts, has_cut=has_cut)
        )
        helps = self._config.idle_timeout_s > 0 or self._helps_only
        if not helps and (holdings.held or (self._own_ended and not holdings.released)):
            return
        if has_cut and (self._awaits_takers() or (self._own_ended and not holdings.released)):
            return
        seeker = Seeker(
            room=self._room(),
            running=len(holdings.in_flight),
            loaded=holdings.state == "working",
            tokens_per_s=self._rate.per_response(self._engine.max_responses_in_flight),
            free_only=self._config.objective == "gpu_seconds" or holdings.is_isolated,
        )
        released = self._released_journalled.items() & self._claimant.owned().items()
        self.inbox.extend(self._claimant.seek(seeker, holdings.known(), len(released)))
        self._claims_handed_out = self._claimant.claims_made()
        self._wants_cut = not self.inbox and self._should_cut()

    def _should_cut(self) -> bool:
        """Whether the held responses fit into members that hold more; of two members, the one that holds less cuts."""
        holdings, share = self._holdings, self._config.cut_share
        if share is None or holdings.state != "working" or holdings.waiting or holdings.released:
            return False
        held = set(holdings.held)
        mine = (len(held), self._incarnation)
        rooms = [other.room for other in self._claimant.working if (other.unfinished, other.incarnation) > mine]
        total = len(held | holdings.own | set(holdings.ended))
        return bool(held) and should_cut(total - len(held), total, len(held), rooms, share)

    def _awaits_takers(self) -> bool:
        """Whether other members still have time to take what was released in a cut."""
        if self._cut_at_s is None or not self._holdings.released:
            return False
        return self._clock.monotonic() - self._cut_at_s < self._config.claim_ttl_s

    def _renew_owned(self) -> None:
        """Renew `owned` after any call that may have read claims, also after one that failed later."""
        if self._claimant.version != self._owned_version:
            self._owned_version, self.owned = self._claimant.version, self._claimant.owned()

    def _room(self) -> int:
        """How many more responses could start now; none while held ones wait here, or released ones wait for takers."""
        if self._holdings.waiting or self.inbox or self._awaits_takers():
            return 0
        limit = self._holdings.batch_limit(self._engine.max_responses_in_flight)
        return max(0, limit - len(self._holdings.in_flight))

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
