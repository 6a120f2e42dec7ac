"""The storage lane: how a member claims, flushes, writes heartbeats, notices others' claims and looks for work.

A generator of actions, which is sent the result of each. What it finds is in the state for the decode lane's next turn,
so storage never waits for the engine.
"""

import logging
from collections.abc import Generator
from typing import Any

from storage.store import StoreUnavailable
from tasks.planning.rebalance import Turns
from tasks.sampling.session.actions import (
    Action,
    AskEnough,
    Beat,
    ClaimSlot,
    LookAround,
    ProbeClaims,
    ReadClaims,
    ReadClosed,
    ReadOwnUnit,
    Rest,
    Seen,
    Take,
    Taken,
    WriteShard,
)
from tasks.sampling.session.state import State

log = logging.getLogger(__name__)
FAILURES_MAX = 5
# How much of the longest round so far the next one is still expected to take.
REMEMBERED = 0.8
Steps = Generator[Action, Any, None]


def begins_s(began_s: float, took_s: float, interval_s: float) -> float:
    """When the next round of duties begins, after one that began at `began_s` and took `took_s`.

    Tokens are safe only when the round has ended, so it begins early enough to end within the interval even if it takes
    twice as long as `took_s`.
    """
    return began_s + interval_s - min(2 * took_s, interval_s / 2)


class StorageLane:
    """The duties of one incarnation, each with the number of its failures in a row."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._failures = dict.fromkeys(("claim", "flush", "heartbeat", "look", "watch"), 0)

    def steps(self) -> Steps:
        """Claim the slot, then do the duties at intervals; ends by itself only if the iteration is closed already.

        A duty that fails because the store is unavailable does not keep the others from being done. It is tried again
        when it is next due. Raises StoreUnavailable at the FAILURES_MAX-th failure of a duty in a row.
        """
        state = self._state
        while not state.claimed:
            yield from self._attempt("claim", self._claim())
            if state.closed:
                return
            if not state.claimed:
                yield Rest(state.now_s + state.wake_interval_s)
        if not state.holdings.held:
            yield from self._attempt("look", self._look())
        began_s, took_s = state.now_s, 0.0
        while True:
            if not state.is_hastened:
                yield Rest(begins_s(began_s, took_s, state.wake_interval_s))
            state.is_hastened = False
            began_s = state.now_s
            yield from self._duties()
            # Not the last round alone: a slow one after a quick one would end too late.
            took_s = max(state.now_s - began_s, REMEMBERED * took_s)

    def _claim(self) -> Steps:
        state = self._state
        state.closed = yield ReadClosed()
        if state.closed:
            return
        yield Beat(state.vitals())
        state.announced = True
        state.take((yield ClaimSlot()))
        state.claimed = True

    def _duties(self) -> Steps:
        """Do all duties that are due, and those that would be late at the next wake-up."""
        state, now_s = self._state, self._state.now_s
        soon_s = now_s + state.wake_interval_s
        if soon_s > state.next_flush_s:
            state.next_flush_s = now_s + state.config.flush_interval_s
            yield from self._attempt("flush", self._flush())
        if soon_s > state.next_beat_s:
            state.next_beat_s = now_s + state.config.heartbeat_interval_s
            yield from self._attempt("heartbeat", self._beat())
            if state.asks_enough:
                yield from self._attempt("watch", self._watch())
        if (state.room() > 0 or state.awaits_takers()) and soon_s > state.next_look_s:
            state.next_look_s = now_s + state.config.heartbeat_interval_s
            yield from self._attempt("look", self._look())

    def _flush(self) -> Steps:
        """Write pending tokens; then read others' claims on held responses, and whether the iteration is closed."""
        state, holdings = self._state, self._state.holdings
        if state.leaving:
            return  # the decode lane writes the rest
        ends, released = holdings.ends, dict(holdings.released)
        yield WriteShard(holdings.take_pending())
        state.ends_journalled, state.released_journalled = ends, released
        yield ProbeClaims((*holdings.held, *released))
        state.closed = state.closed or (yield ReadClosed())

    def _beat(self) -> Steps:
        yield Beat(self._state.vitals())

    def _watch(self) -> Steps:
        self._state.enough = yield AskEnough()

    def _look(self) -> Steps:
        """Look for work and take it."""
        state, asked = self._state, self._state.looks_asked
        state.is_looking = True
        try:
            yield from self._flush()
            if state.closed:
                return
            yield ReadClaims()
            if not state.may_always_go:
                # Other members may claim released responses before the next look.
                state.own_ended = not state.holdings.released and (yield ReadOwnUnit(state.cuts, state.has_cut))
            if state.wants_work():
                yield from self._seek()
            state.looks_answered = asked
        finally:
            state.is_looking = False

    def _seek(self) -> Steps:
        state = self._state
        seeker = state.seeker()
        seen: Seen = yield LookAround(state.holdings.known(), seeker.running, state.released_count())
        state.take(seen.stray)
        if seen.stray:
            return
        found = 0
        turns = Turns(seeker, seen.holders, seen.unclaimed)
        while transfer := turns.next():
            taken: Taken = yield Take(transfer)
            state.take_more(taken)
            turns.took(transfer, len(taken.work))
            found += len(taken.work)
        state.note_look(seen, found_work=bool(found))

    def _attempt(self, duty: str, steps: Steps) -> Steps:
        try:
            yield from steps
        except StoreUnavailable as error:
            self._failures[duty] += 1
            log.warning("slot %d: %s failed %d times: %s", self._state.config.slot, duty, self._failures[duty], error)
            if self._failures[duty] >= FAILURES_MAX:
                raise
        else:
            self._failures[duty] = 0
