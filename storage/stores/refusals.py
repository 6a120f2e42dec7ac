"""Refusals that can pass by themselves: how long a call bears them, and which store is asked again.

Examples are a full disk, a used-up quota, expired credentials, and a clock that is off. The stores decide which answers
are such refusals; this module knows no store.
"""

import random
from collections.abc import Callable
from typing import TypeVar

from storage.clock import SystemClock
from storage.stores.store import StoreDenied, StoreUnavailable, StoreUnfit
from storage.waiting import Wait

Result = TypeVar("Result")
# As long as the notice of a pool that says nothing else (`grace_s`).
REFUSED_S_MAX = 60.0
PAUSE_S, PAUSE_S_MAX = 0.25, 5.0


class DeniedForNow(StoreDenied):
    """A refusal that can pass by itself. Only `Refusals` catches this error; callers get StoreDenied."""


class Refusals:
    """Repeats the calls to one store whose refusals can pass by themselves. Several threads may call it.

    Only a store that has answered is asked again. If the first call is refused, the cause is a mistake such as wrong
    keys, and the user should learn of the mistake at once.
    """

    def __init__(self, limit_s: float) -> None:
        """limit_s: how long one call bears such refusals."""
        self._limit_s = limit_s
        self._has_answered = False

    def outlast(self, call: Callable[[], Result]) -> Result:
        """The result of `call`, which is made again while it raises DeniedForNow; raises StoreDenied at the end."""
        waiting: Wait | None = None
        attempts = 0
        while True:
            try:
                result = call()
            except DeniedForNow as error:
                if not self._has_answered:
                    raise StoreDenied(str(error)) from error.__cause__
                attempts += 1
                what = f"the store to refuse no longer ({error})"
                waiting = waiting or Wait(what, SystemClock(), self._limit_s, "then the call fails for good")
                if waiting.is_over:
                    refused = f"{error}; so it was at {attempts} attempts within {self._limit_s:.3g} s"
                    raise StoreDenied(refused) from error.__cause__
                waiting.pause(random.uniform(0.5, 1.0) * min(PAUSE_S_MAX, PAUSE_S * 2 ** (attempts - 1)))
            except (StoreDenied, StoreUnavailable, StoreUnfit):
                raise
            except Exception:
                # That the object exists, or that there is none.
                self._has_answered = True
                raise
            else:
                self._has_answered = True
                return result
