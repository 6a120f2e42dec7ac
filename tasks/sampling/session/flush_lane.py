"""The flush lane: a member writes its new tokens and its heartbeat, each at least once per interval.

A generator of actions, which is sent the result of each. It reads nothing and waits for no other lane, so a slow engine
or a long look for work puts off no flush.
"""

from tasks.sampling.session.actions import Lane, Rest, WriteHeartbeat, WriteShard
from tasks.sampling.session.duties import Duties, Steps
from tasks.sampling.session.state import State

# How much of the longest round so far the next one is still expected to take.
REMEMBERED = 0.8


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
