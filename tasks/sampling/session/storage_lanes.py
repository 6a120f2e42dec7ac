"""The lanes of storage: the flush lane writes tokens and heartbeats, the claim lane reads claims and looks for work.

Each is a generator of actions, which is sent the result of each action. The flush lane reads nothing and waits for no
other lane, so a slow engine or a long look for work puts off no flush. The claim lane claims the member's slot and
notices others' claims and the end; the decode lane finds the results in the state at its next turn.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from storage.stores.store import StoreUnavailable
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
    Steps,
    Take,
    Taken,
    WriteHeartbeat,
    WriteShard,
)
from tasks.sampling.session.state import State

log = logging.getLogger(__name__)
FAILURES_MAX = 5
# How much of the longest round so far the next one is still expected to take.
REMEMBERED = 0.8


class Duties:
    """The failures in a row of each duty of a slot."""

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._failures: Counter[str] = Counter()

    def attempt(self, duty: str, steps: Steps) -> Steps:
        """Do a duty. If the store is unavailable, the duty is tried again when it is next due, and others go on.

        Raises StoreUnavailable at the FAILURES_MAX-th failure of the duty in a row.
        """
        try:
            yield from steps
        except StoreUnavailable as error:
            self._failures[duty] += 1
            log.warning("slot %d: %s failed %d times: %s", self._slot, duty, self._failures[duty], error)
            if self._failures[duty] >= FAILURES_MAX:
                raise
        else:
            self._failures[duty] = 0


def begins_s(began_s: float, took_s: float, interval_s: float) -> float:
    """When the next round begins, after one that began at `began_s` and took `took_s`.

    Tokens are safe only when the round has ended, so it begins early enough to end within the interval even if it takes
    twice as long as `took_s`.
    """
    return began_s + interval_s - min(2 * took_s, interval_s / 2)


class FlushLane:
    """Rounds of writing, from the first heartbeat until the member leaves."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._duties = Duties(state.config.slot)

    def steps(self) -> Steps:
        """Write at intervals; after each round the claim lane has its turn. It does not end by itself."""
        state = self._state
        began_s, took_s = state.now_s, 0.0
        while True:
            if Lane.FLUSH not in state.hastened:
                yield Rest(begins_s(began_s, took_s, state.wake_interval_s))
            state.hastened.discard(Lane.FLUSH)
            began_s = state.now_s
            if not state.announced:
                continue
            yield from self._round()
            # Not the last round alone: a slow one after a quick one would end too late.
            took_s = max(state.now_s - began_s, REMEMBERED * took_s)
            state.hastened.add(Lane.CLAIM)

    def _round(self) -> Steps:
        """Write what is due, and what would be late at the next wake-up."""
        state, now_s = self._state, self._state.now_s
        soon_s = now_s + state.wake_interval_s
        if soon_s > state.next_flush_s:
            state.next_flush_s = now_s + state.config.flush_interval_s
            yield from self._duties.attempt("flush", self._flush())
        if soon_s > state.next_beat_s:
            state.next_beat_s = now_s + state.config.heartbeat_interval_s
            yield from self._duties.attempt("heartbeat", self._beat())

    def _flush(self) -> Steps:
        state, holdings = self._state, self._state.holdings
        if state.leaving:
            return  # the decode lane writes the rest
        ends, released, asked = holdings.ends, dict(holdings.released), state.looks_asked
        owed, state.unjournalled_tool_s = list(holdings.acting.values()), 0.0
        yield WriteShard(holdings.take_pending())
        for turn in owed:
            turn.journalled = True
        state.ends_journalled, state.released_journalled, state.looks_due = ends, released, asked

    def _beat(self) -> Steps:
        yield WriteHeartbeat(self._state.heartbeat_state())


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
