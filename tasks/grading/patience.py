"""Patience: how long the calls of a reward function, one for each response, may take when some of them hang.

This module only counts; isolation.py calls the function and reads the clock.
"""

# The least that a call may take, in what an answered one takes on average: while little is lost, and later.
_SPARE, _SPARE_LATER = 20, 5
# But no less than a call's share of so many time limits.
_SHARED = 2
# How many time limits, each with the time in which the process starts, may be lost before calls get less. When twice as
# much was lost with processes that ended, none is made any more.
_LOST_MAX = 4


class Patience:
    """The time allowed for each call, and the time lost with calls in vain, in an iteration.

    A call may take `limit_s`. After the first answered call, each call that hangs halves the time of the next call, but
    never below a multiple of the average answered call. A function that always hangs costs a few time limits, however
    many responses wait.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._calls = 0
        self._answered = 0
        self._answered_s = self._ended_s = 0.0
        self.hung = 0
        """Calls that took all the time allowed."""
        self.lost_s = 0.0
        """The seconds of calls that were not answered, and of the starts of processes that these made necessary."""

    def expect(self, calls: int) -> None:
        """Expect `calls` further calls."""
        self._calls += calls

    def allowed_s(self, start_s: float) -> float:
        """The seconds that the next call may take; 0 for no call. start_s: seconds that the process took to start."""
        most_lost_s = _LOST_MAX * (self._limit_s + start_s) + self._answered_s
        if self._ended_s > 2 * most_lost_s:
            return 0.0
        average_s = self._answered_s / self._answered if self._answered else 0.0
        share_s = _SHARED * self._limit_s / self._calls
        if self.lost_s > most_lost_s:
            return min(self._limit_s, max(_SPARE_LATER * average_s, share_s))
        if not self._answered:
            return self._limit_s
        return min(self._limit_s, max(self._limit_s / 2.0**self.hung, _SPARE * average_s, share_s))

    def answered(self, seconds: float) -> None:
        """Note an answered call."""
        self._answered += 1
        self._answered_s += seconds

    def lost(self, seconds: float, *, ended: bool) -> None:
        """Note a call in vain. ended: the process ended, too; `seconds` include its new start."""
        self.lost_s += seconds
        if ended:
            self._ended_s += seconds
