"""State: the knowledge of one incarnation, and the rules for writing, looking for work, cutting and leaving.

No store, engine, clock or thread is held here. The state machine keeps `now_s` and `wall_s` up to date.
"""

import logging
import math
from collections.abc import Collection, Sequence

from storage.records.records import PlanRecord
from tasks.crew_model.decode_rate import DecodeRate
from tasks.crew_model.rebalance import Seeker, should_cut
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.session.actions import Action, ClaimedResponse, Claims, HeartbeatState, HeldTurn, Lane, Seen, Taken
from tasks.sampling.session.holdings import Holdings
from tasks.sampling.session.session_config import SessionConfig
from tasks.sampling.session.session_outcome import EngineHealth, SessionOutcome
from tasks.turns.environments import Answer

log = logging.getLogger(__name__)


class State:
    """An incarnation that has claimed nothing yet, at `now_s`.

    engine_max: the most responses that the engine decodes together. asks_enough: whether the member must ask, once its
    time limit has passed or when it stands and holds nothing, if it may leave. health: of the engine; kept up to date.
    """

    def __init__(
        self,
        plan: PlanRecord,
        incarnation: str,
        config: SessionConfig,
        *,
        engine_max: int,
        asks_enough: bool,
        has_turns: bool = False,
        health: EngineHealth,
        now_s: float,
    ) -> None:
        self.incarnation = incarnation
        self.config = config
        self.engine_max = engine_max
        self.now_s, self.wall_s = now_s, 0.0
        place = plan.slots[config.slot] if config.slot < len(plan.slots) else None
        own = frozenset(plan.responses_of(config.slot)) if place else frozenset[int]()
        self.holdings = Holdings(own=own, batch_max=place.batch_max if place else None, has_turns=has_turns)
        self.rate = DecodeRate()
        # Why the engine is dead; None: it lives. As text: an exception would keep the memory of its frames alive.
        self.death = "in an earlier iteration" if health.died else None
        self.health = health
        self.restarts = 0
        # What each lane does now; a lane that has not begun, or has ended, is missing.
        self.doing: dict[Lane, Action] = {}
        self.working_at_s: float | None = None

        # What was read of the run.
        self.claims = Claims(owned={}, made=0, recovered=0)
        self.claims_handed_out = 0
        self.announced = self.claimed = self.closed = False
        self.asks_enough = asks_enough
        self.enough = not asks_enough
        self.nothing_left = False

        # The end.
        self.noticed = self.leaving = False
        self.error: Exception | None = None
        self.helps_only = place is None
        self.may_always_go = self.helps_only or config.standing or config.time_limit_s is not None
        self.own_ended = self.may_always_go
        self._ends_s = math.inf if config.time_limit_s is None else now_s + config.time_limit_s
        self._idle_since_s: float | None = None
        # Responses that others are to have, from the decode lane's next turn on.
        self.asked_for: set[int] = set()
        self._wants_cut = False
        self.has_cut = False
        self._handed_over_at_s = -math.inf

        # The duties of the flush lane and the claim lane; a lane in `hastened` goes on at once when it next would rest.
        self.wake_interval_s = min(config.flush_interval_s, config.heartbeat_interval_s)
        self.next_flush_s = now_s + config.flush_interval_s
        self.next_beat_s = now_s + config.heartbeat_interval_s
        self.next_watch_s = now_s + config.heartbeat_interval_s
        self.next_look_s = now_s
        self.hastened: set[Lane] = set()
        self.is_looking = False
        # Looks asked for so far; those of them with everything from before in the journal; those answered.
        self.looks_asked = self.looks_due = self.looks_answered = 0
        self.ends_journalled = 0
        self.released_journalled: dict[int, int] = {}
        # How long tools took for answers that are in no shard yet.
        self.unjournalled_tool_s = 0.0

    # The flush lane and the claim lane.

    def hasten(self) -> None:
        """Schedule a flush, a heartbeat and then a look for now, because of news or for want of work."""
        self.looks_asked += 1
        self.next_flush_s = self.next_beat_s = self.next_look_s = self.now_s
        self.hastened.add(Lane.FLUSH)

    def hasten_flush(self) -> None:
        """Schedule a flush for now, because an answer waits for the flush or would be costly to lose."""
        self.next_flush_s = self.now_s
        self.hastened.add(Lane.FLUSH)

    @property
    def watch_due(self) -> bool:
        """Whether to ask now, or before the next wake-up, if the member may leave."""
        is_busy = self.config.standing and self.holdings.held and self.now_s < self._ends_s
        is_asked = self.asks_enough and not is_busy
        return is_asked and self.now_s + self.wake_interval_s > self.next_watch_s

    def see(self, claims: Claims) -> None:
        """Let go of responses that other members have claimed, because new tokens for them do not count."""
        self.claims = claims
        if lost := self.holdings.see(claims.owned):
            log.info("slot %d: %d responses were claimed by another member", self.config.slot, lost)

    def take(self, work: tuple[ClaimedResponse, ...]) -> None:
        """Hold claimed responses; from now on the heartbeat's load covers every claim of the member."""
        self._hold(work)
        self.claims_handed_out = self.claims.made

    def take_more(self, taken: Taken) -> None:
        """Hold the responses of a transfer.

        An earlier claim may have come to light meanwhile, whose responses only the next look returns, so the load
        covers no more than the new claims.
        """
        self._hold(taken.work)
        self.claims_handed_out += taken.claims

    def _hold(self, work: tuple[ClaimedResponse, ...]) -> None:
        for item in work:
            self.holdings.take(item)

    def room(self) -> int:
        """The number of further responses that could start now; 0 while any wait here, or released ones for takers."""
        if self.holdings.waiting or self.awaits_takers():
            return 0
        return max(0, self.holdings.batch_limit(self.engine_max) - len(self.holdings.in_flight))

    def heartbeat_state(self) -> HeartbeatState:
        """The heartbeat of this moment."""
        holdings = self.holdings
        unjournalled = holdings.ends - self.ends_journalled
        return HeartbeatState(
            state=holdings.state,
            tokens_generated=holdings.generated,
            tokens_recovered=self.claims.recovered,
            responses_finished=len(holdings.ended),
            claims=self.claims_handed_out,
            unfinished=len(holdings.held) + len(holdings.released) + unjournalled,
            running=len(holdings.in_flight),
            waiting=len(holdings.waiting),
            acting=len(holdings.acting),
            released=len(self.released_journalled.items() & holdings.released.items()),
            plateau=self.rate.plateau(),
            room=self.room() if self.wants_work() else 0,
            working_at_s=self.working_at_s,
            decode_s=self.rate.total_s,
            step_s=self.rate.points(),
        )

    def in_words(self) -> str:
        """The progress of the incarnation in words, and the reason for waiting; any thread may ask."""
        held = self.holdings
        parts = [f"{len(held.ended):,} responses ended, {held.generated:,} tokens generated"]
        if self.claims.recovered:
            parts.append(f"{self.claims.recovered:,} tokens taken over")
        waiting = ((held.in_flight, "decode"), (held.waiting, "wait for a row"), (held.acting, "wait for tools"))
        parts += [f"{len(those):,} {what}" for those, what in waiting if those]
        if not held.held:
            parts.append("waits for responses that it can take")
        elif held.state == "loading":
            parts.append("waits for the weights")
        return "; ".join(parts)

    @property
    def cuts(self) -> bool:
        """Whether the member hands its last responses over and leaves, when other members have room."""
        return self.config.cut_share is not None

    def wants_work(self) -> bool:
        """Whether a look is to take responses, by what the member still holds and what its slot is responsible for."""
        holdings = self.holdings
        is_free = self.own_ended and not holdings.released
        if self.has_cut and (self.awaits_takers() or is_free):
            return False
        helps = self.config.idle_timeout_s > 0 or self.helps_only
        return helps or not (holdings.held or is_free)

    def seeker(self) -> Seeker:
        """This member, as rebalancing sees it."""
        return Seeker(
            room=self.room(),
            running=len(self.holdings.in_flight),
            held=len(self.holdings.held),
            loaded=self.holdings.state == "working",
            tokens_per_s=self.rate.per_response(self.engine_max),
            free_only=self.config.objective == "gpu_seconds" or self.holdings.is_isolated,
        )

    def released_count(self) -> int:
        """How many journalled releases no other member has claimed."""
        return len(self.released_journalled.items() & self.claims.owned.items())

    def note_look(self, seen: Seen, *, found_work: bool) -> None:
        """Draw the conclusions of a look that has ended."""
        self.nothing_left = seen.nothing_left
        self._wants_cut = not found_work and self._should_cut(seen)

    # The decode lane.

    def is_done(self) -> bool:
        """Whether the member leaves now. If not, and it holds nothing, its waiting time begins or goes on."""
        if self.closed or (self.claimed and self.now_s >= self._ends_s and self.enough):
            return True
        if not self.claimed:
            return False
        if self.holdings.held:
            self._idle_since_s = None
            return False
        if self._idle_since_s is None:
            self._idle_since_s = self.next_watch_s = self.now_s
            self.hasten()
        return self._may_leave(self.now_s - self._idle_since_s)

    def _may_leave(self, idle_s: float) -> bool:
        """Whether a member that has held nothing for `idle_s` may leave."""
        # A look has shown, after the last end, what other members have claimed; none that may bring work is under way.
        looked = self.looks_answered == self.looks_asked and not self.is_looking and not self.holdings.released
        if self.config.standing:
            return looked and (self.enough or idle_s >= self.config.idle_timeout_s)
        waits_s = 0.0 if self.config.objective == "gpu_seconds" else self.config.idle_timeout_s
        impatient = idle_s >= waits_s and self.own_ended
        return looked and (self.nothing_left or impatient)

    @property
    def needs_no_weights(self) -> bool:
        """Whether a wait for weights is useless, because the member leaves anyway."""
        return self.noticed or self.closed or self.error is not None

    def raise_error(self) -> None:
        """Raise the error that ended the flush lane or the claim lane, if there is an error."""
        if self.error is not None:
            raise self.error

    def note_begun(self, turns: Sequence[HeldTurn], effects: Collection[int]) -> None:
        """Note that turns are being answered; a flush first journals the turns of responses in `effects`."""
        self.holdings.note_begun(turns, effects)
        if any(turn.response in effects and not turn.journalled for turn in turns):
            self.hasten_flush()

    def take_answers(self, answers: Sequence[Answer]) -> None:
        """Append answers to their responses, and have some of them journalled at once.

        Tool time is work, too, so no more than an interval of it may be lost. A call with side effects should not be
        made again, and one that may have been made before should not be once more.
        """
        has_effects = False
        for answer in answers:
            owed = self.holdings.acting.get(answer.response)
            if self.holdings.answer(answer):
                self.unjournalled_tool_s += answer.seconds
                has_effects |= owed is not None and (owed.has_effects or owed.unknown)
        if has_effects or self.unjournalled_tool_s > self.config.flush_interval_s:
            self.hasten_flush()

    @property
    def cut_due(self) -> bool:
        """Whether everything held is to be released, once no environment owes an answer; at most once per session."""
        return self._wants_cut and not self.has_cut and not self.holdings.acting

    def cut(self) -> None:
        """Release everything held: members with room go on, and the machine is no longer worth its price."""
        log.info("slot %d: handing over its last %d responses", self.config.slot, len(self.holdings.held))
        self.has_cut = True
        self._release(list(self.holdings.held))

    def hand_over(self) -> None:
        """Release held responses that others have asked for, once the tokens are journalled and no tool is called."""
        if not self.asked_for:
            return
        held, acting = self.holdings.held, self.holdings.acting
        asked_for = [response for response in self.asked_for if response in held and response not in acting]
        self.asked_for = set()
        if asked_for:
            self._release(asked_for)

    def _release(self, responses: Collection[int]) -> None:
        self.holdings.release(responses)
        self._handed_over_at_s = self.now_s
        self.hasten()

    def awaits_takers(self) -> bool:
        """Whether members still have time to take the released responses."""
        return bool(self.holdings.released) and self.now_s - self._handed_over_at_s < self.config.claim_ttl_s

    def note_loaded(self) -> None:
        """Note that the engine has the weights."""
        self.holdings.state = "working"
        if self.working_at_s is None:
            self.working_at_s = self.wall_s
        self.hasten()

    def note_death(self, error: Exception) -> None:
        """Note that the engine must be restarted before its next use."""
        self.death = " ".join(str(error).split())
        self.health.died = True
        # Until the engine has loaded again, nothing is looked for, so that what the last look showed becomes old.
        self._wants_cut = False

    def note_restarted(self) -> None:
        """Note that the engine has been restarted and needs weights."""
        self.death = None
        self.health.died = False

    def begin_again(self, error: EngineDied) -> None:
        """Queue the responses of a dead engine again; raises EngineDied after engine_restarts_max restarts."""
        self.note_death(error)
        self.holdings.begin_again()
        tried = f"{self.restarts} of {self.config.engine_restarts_max} restarts tried"
        log.warning("slot %d: the engine died, %s: %s", self.config.slot, tried, self.death)
        if self.restarts >= self.config.engine_restarts_max:
            raise EngineDied(f"the engine died, {tried}: {self.death}") from error
        self.hasten()

    def outcome(self) -> SessionOutcome:
        return SessionOutcome(
            incarnation=self.incarnation,
            tokens_generated=self.holdings.generated,
            tokens_recovered=self.claims.recovered,
            responses_finished=len(self.holdings.ended),
        )

    def check(self) -> None:
        """Assert the invariants that are cheap to check."""
        self.holdings.check()
        assert self.ends_journalled <= self.holdings.ends, "more ends were journalled than there are"
        assert self.looks_answered <= self.looks_due <= self.looks_asked, "a look was answered that was not asked for"
        assert self.claims_handed_out <= self.claims.made, "the load covers claims that were not made"
        assert self.death is None or not self.holdings.in_flight, "a dead engine decodes"

    def _should_cut(self, seen: Seen) -> bool:
        """Whether the held responses fit into members that hold more; the smaller of two members cuts."""
        holdings, share = self.holdings, self.config.cut_share
        if share is None or holdings.state != "working" or holdings.waiting or holdings.released:
            return False
        held = set(holdings.held)
        mine = (len(held), self.incarnation)
        rooms = [other.room for other in seen.working if (other.unfinished, other.incarnation) > mine]
        total = len(held | holdings.own | set(holdings.ended))
        return bool(held) and should_cut(total - len(held), total, len(held), rooms, share)
