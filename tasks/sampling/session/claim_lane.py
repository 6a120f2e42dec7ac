"""The claim lane: how a member claims its slot, notices others' claims and the end, and looks for work.

A generator of actions, which is sent the result of each. The decode lane finds the results in the state at its next
turn, so the engine never waits for a read or a claim.
"""

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from tasks.crew_model.rebalance import Transfers
from tasks.sampling.session.actions import (
    Action,
    AskEnough,
    ClaimedResponse,
    ClaimSlot,
    Lane,
    LookAround,
    ProbeClaims,
    ReadAsks,
    ReadClaims,
    ReadClosed,
    ReadOwnUnit,
    Rest,
    Seen,
    Take,
    Taken,
    WriteHeartbeat,
)
from tasks.sampling.session.duties import Duties, Steps
from tasks.sampling.session.state import State


class ClaimLane:
    """One claim of the slot, then rounds of reading, each after a round of the flush lane."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._duties = Duties(state.config.slot)

    def steps(self) -> Steps:
        """Claim the slot, then read news and look for work; ends by itself only if the iteration is closed already."""
        state = self._state
        while not state.claimed:
            yield from self._duties.attempt("claim", self._claim())
            if state.closed:
                return
            if not state.claimed:
                yield Rest(state.now_s + state.wake_interval_s)
        if not state.holdings.held:
            yield from self._duties.attempt("look", self._look())
        while True:
            if Lane.CLAIM not in state.hastened:
                # The flush lane ends the rest. If its write hangs, others' claims are noticed all the same.
                yield Rest(state.now_s + 2 * state.wake_interval_s)
            state.hastened.discard(Lane.CLAIM)
            yield from self._round()

    def _claim(self) -> Steps:
        state = self._state
        yield from self._ask_closed()
        if state.closed:
            return
        if not state.announced:
            yield WriteHeartbeat(state.heartbeat_state())
            state.announced = True
        work: tuple[ClaimedResponse, ...] = yield ClaimSlot()
        yield from self._ask_closed()
        state.claimed = True
        if not state.closed:
            state.take(work)

    def _ask_closed(self) -> Steps:
        """Ask whether the iteration is closed; after a claim, because a closed iteration's journal may be deleted.

        A member that slept while reading the journal may have missed deleted shards, and would generate their tokens
        again.
        """
        self._state.closed = self._state.closed or (yield ReadClosed())

    def _round(self) -> Steps:
        """Read what is new, and do what is due or would be late at the next wake-up."""
        state, now_s = self._state, self._state.now_s
        soon_s = now_s + state.wake_interval_s
        yield from self._duties.attempt("news", self._news())
        if state.watch_due:
            state.next_watch_s = now_s + state.config.heartbeat_interval_s
            yield from self._duties.attempt("watch", self._watch())
        is_due = soon_s > state.next_look_s or state.looks_answered < state.looks_due
        if (state.room() > 0 or state.awaits_takers()) and is_due:
            state.next_look_s = now_s + state.config.heartbeat_interval_s
            yield from self._duties.attempt("look", self._look())

    def _news(self) -> Steps:
        """Read others' claims on what this member held at its last flush, whether the iteration is closed, and asks."""
        state = self._state
        yield ProbeClaims((*state.holdings.held, *state.released_journalled))
        yield from self._ask_closed()
        if state.holdings.in_flight:
            state.asked_for.update((yield ReadAsks()))

    def _watch(self) -> Steps:
        self._state.enough = yield AskEnough()

    def _look(self) -> Steps:
        """Look for work and take it."""
        state, asked = self._state, self._state.looks_due
        if state.closed:
            return
        state.is_looking = True
        try:
            yield from self._look_at_own()
            if state.wants_work():
                yield from self._seek()
                if state.own_ended:
                    # The search takes time and reads claims, by which the slot may be responsible for more than before.
                    yield from self._look_at_own()
            state.looks_answered = asked
        except Exception:
            # The member may have claimed what it does not hold yet; the next look tells.
            state.own_ended, state.nothing_left = state.may_always_go, False
            raise
        finally:
            state.is_looking = False

    def _look_at_own(self) -> Steps:
        """Read all claims, and note whether all responses of the slot's duty have ended."""
        state = self._state
        yield ReadClaims()
        if not state.may_always_go:
            # Other members may claim released responses before the next look.
            state.own_ended = not state.holdings.released and bool(
                (yield from self._read(lambda: ReadOwnUnit(state.holdings.claim_epochs(), state.cuts, state.has_cut)))
            )

    def _read(self, action: Callable[[], Action]) -> Generator[Action, Any, Any]:
        """Perform an action that may read long journals in parts, and read the news between two parts.

        The member thus notices within one part that another member has claimed a response in flight here. Returns None
        if the iteration was closed meanwhile.
        """
        while not self._state.closed:
            result = yield action()
            if result is not None:
                return result
            yield from self._news()
        return None

    def _seek(self) -> Steps:
        state = self._state
        seeker = state.seeker()
        seen: Seen | None = yield from self._read(
            lambda: LookAround(state.holdings.claim_epochs(), seeker.held, state.released_count())
        )
        if seen is None:
            return
        if seen.stray:
            yield from self._ask_closed()
            if not state.closed:
                state.take(seen.stray)
            return
        found = 0
        turns = Transfers(seeker, seen.holders, seen.unclaimed, seen.unseen)
        while transfer := turns.next():
            taken: Taken | None = yield from self._read(partial(Take, transfer))
            if taken is None:
                return
            if taken.work:
                yield from self._ask_closed()
                if state.closed:
                    return
            state.take_more(taken)
            turns.took(transfer, len(taken.work) + taken.asked)
            found += len(taken.work)
            if taken.asked:
                # The answer comes sooner than the next look would.
                state.next_look_s = state.now_s + state.wake_interval_s
        state.note_look(seen, found_work=bool(found))
