"""Faults between a process and its object store, as wrappers around any ObjectStore; for tests and simulation.

Everything is drawn from the caller's seeded generator and waits on the caller's clock, so a fault can be repeated. The
wrappers know neither keys nor bodies, and decide only whether and when a call happens and which answer its caller gets.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, TypeVar

from storage.clock import Clock
from storage.stores.local import temporary_name
from storage.stores.store import ObjectStore, StoreDenied, StoreUnavailable

Result = TypeVar("Result")
Later = Callable[[float, Callable[[], object]], None]


class Crashed(BaseException):
    """The process of this call no longer exists."""


class Fault(Enum):
    """What can happen to one call; the value names the field of FaultRates that says how often."""

    THROTTLED = "throttled"
    DENIED = "denied"
    FULL = "full"
    REQUEST_LOST = "request_lost"
    REQUEST_LATE = "request_late"
    ANSWER_LOST = "answer_lost"
    ANSWER_RETRIED = "answer_retried"
    PAUSE_BEFORE = "pause_before"
    PAUSE_AFTER = "pause_after"


@dataclass(frozen=True, kw_only=True)
class FaultRates:
    """Probabilities per call, of which at most one strikes, and times in seconds.

    Attributes:
        throttled: 503 SlowDown at once; nothing was done.
        denied: 403 at once; nothing was done.
        full: a create or put gets the error of a full disk or a used-up quota at once; reads and deletes are done.
        request_lost: no answer within `timeout_s`; nothing was done.
        request_late: no answer within `timeout_s`; a write is done after that, up to `timeout_s` later, a read is lost.
        answer_lost: done, but no answer within `timeout_s`.
        answer_retried: done, and repeated by a client below that got no answer, so a create says False of its own
            object.
        pause_before, pause_after: the process freezes for a time drawn from `pause_s`, before or after the call is
            done, and then goes on without noticing.
        latency_s: mean of the exponential time to the store, and of the time back.
        page_keys: number of keys in each call of a listing, which may miss an object created behind the keys already
            listed; 0: a single call for all keys.
    """

    throttled: float = 0.0
    denied: float = 0.0
    full: float = 0.0
    request_lost: float = 0.0
    request_late: float = 0.0
    answer_lost: float = 0.0
    answer_retried: float = 0.0
    pause_before: float = 0.0
    pause_after: float = 0.0
    latency_s: float = 0.0
    timeout_s: float = 0.0
    pause_s: tuple[float, float] = (0.0, 0.0)
    page_keys: int = 0

    def __post_init__(self) -> None:
        rates = {fault.value: float(getattr(self, fault.value)) for fault in Fault}
        if min(rates.values()) < 0 or sum(rates.values()) > 1:
            raise ValueError(f"fault rates: value {rates}; allowed: none negative, together at most 1")

    def draw(self, rng: random.Random) -> Fault | None:
        """What happens to the next call."""
        drawn = rng.random()
        return next((fault for bound, fault in self._bounds if drawn < bound), None)

    @cached_property
    def _bounds(self) -> tuple[tuple[float, Fault], ...]:
        bounds = itertools.accumulate(float(getattr(self, fault.value)) for fault in Fault)
        return tuple(zip(bounds, Fault, strict=True))


class FaultyStore:
    """A store behind a bad line. `rates` may be replaced at any time, for an outage, say. `struck` counts faults.

    Args:
        inner: the real store.
        rates: how often each fault strikes.
        rng: every call draws from it.
        clock: latency, timeouts and pauses are slept on it.
        later: calls a function after some seconds, whatever becomes of the caller; needed for `request_late`.
    """

    def __init__(
        self, inner: ObjectStore, rates: FaultRates, rng: random.Random, clock: Clock, later: Later | None = None
    ) -> None:
        self.rates = rates
        self.struck: Counter[Fault] = Counter()
        self._inner = inner
        self._rng = rng
        self._clock = clock
        self._later = later

    @property
    def url(self) -> str:
        return self._inner.url

    def create(self, key: str, body: bytes) -> bool:
        return self._call(f"create {key!r}", lambda: self._inner.create(key, body), writes=True, retried=False)

    def put(self, key: str, body: bytes) -> None:
        self._call(f"put {key!r}", lambda: self._inner.put(key, body), writes=True)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._call(f"get {key!r}", lambda: self._inner.get(key, start, end))

    def list(self, prefix: str, after: str = "") -> list[str]:
        size = self.rates.page_keys
        keys: list[str] = []
        while True:
            page = self._call(f"list {prefix!r}", partial(self._inner.list, prefix, after))
            if not size or len(page) <= size:
                return [*keys, *page]
            keys += page[:size]
            after = keys[-1]

    def delete(self, key: str) -> None:
        self._call(f"delete {key!r}", lambda: self._inner.delete(key), writes=True, frees=True)

    def _call(
        self,
        what: str,
        effect: Callable[[], Result],
        *,
        writes: bool = False,
        frees: bool = False,
        retried: Result | None = None,
    ) -> Result:
        rates, fault = self.rates, self.rates.draw(self._rng)
        if fault is not None:
            self.struck[fault] += 1
        self._travel(rates)
        if fault is Fault.THROTTLED:
            raise StoreUnavailable(f"{what}: 503 SlowDown")
        if fault is Fault.DENIED:
            raise StoreDenied(f"{what}: 403 AccessDenied")
        if fault is Fault.FULL and writes and not frees:
            raise StoreDenied(f"{what}: no space left")
        if fault in (Fault.REQUEST_LOST, Fault.REQUEST_LATE):
            if fault is Fault.REQUEST_LATE and writes:
                self._do_later(rates.timeout_s + self._rng.uniform(0, rates.timeout_s), effect)
            self._clock.sleep(rates.timeout_s)
            raise StoreUnavailable(f"{what}: no answer within {rates.timeout_s:.1f} s ({fault.value})")
        if fault is Fault.PAUSE_BEFORE:
            self._clock.sleep(self._rng.uniform(*rates.pause_s))
        outcome = effect()
        if fault is Fault.PAUSE_AFTER:
            self._clock.sleep(self._rng.uniform(*rates.pause_s))
        if fault is Fault.ANSWER_LOST:
            self._clock.sleep(rates.timeout_s)
            raise StoreUnavailable(f"{what}: no answer within {rates.timeout_s:.1f} s (answer lost)")
        self._travel(rates)
        return retried if fault is Fault.ANSWER_RETRIED and retried is not None else outcome

    def _travel(self, rates: FaultRates) -> None:
        if rates.latency_s > 0:
            self._clock.sleep(self._rng.expovariate(1 / rates.latency_s))

    def _do_later(self, delay_s: float, effect: Callable[[], object]) -> None:
        if self._later is None:
            raise ValueError("request_late: value above 0; allowed: only with `later`, which does the request later")
        self._later(delay_s, effect)


class CrashingStore:
    """Its process dies at the `at_call`-th call (from 0), and every call after that raises Crashed too.

    writes_only: count only creates, puts and deletes.
    moment: whether the call was done before the process died ("after"), was not ("before"), or is done `delay_s`
    seconds later by `later`, like a request that was already on its way.
    """

    def __init__(
        self,
        inner: ObjectStore,
        at_call: int,
        moment: Literal["before", "after", "later"] = "before",
        *,
        writes_only: bool = False,
        later: Later | None = None,
        delay_s: float = 0.0,
    ) -> None:
        if moment == "later" and later is None:
            raise ValueError("moment: value 'later'; allowed: only with `later`, which does the request later")
        self.last_call: str | None = None
        self._inner = inner
        self._left = at_call
        self._writes_only = writes_only
        self.moment = moment
        self._later = later
        self._delay_s = delay_s

    @property
    def url(self) -> str:
        return self._inner.url

    def create(self, key: str, body: bytes) -> bool:
        return self._call(f"create {key}", lambda: self._inner.create(key, body), writes=True)

    def put(self, key: str, body: bytes) -> None:
        self._call(f"put {key}", lambda: self._inner.put(key, body), writes=True)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._call(f"get {key}", lambda: self._inner.get(key, start, end))

    def list(self, prefix: str, after: str = "") -> list[str]:
        return self._call(f"list {prefix}", lambda: self._inner.list(prefix, after))

    def delete(self, key: str) -> None:
        self._call(f"delete {key}", lambda: self._inner.delete(key), writes=True)

    def _call(self, what: str, effect: Callable[[], Result], *, writes: bool = False) -> Result:
        if self.last_call is None:
            self._left -= writes or not self._writes_only
            if self._left >= 0:
                return effect()
            self.last_call = what
            if writes and self.moment == "after":
                effect()
            elif writes and self.moment == "later" and self._later is not None:
                self._later(self._delay_s, effect)
        raise Crashed(f"crashed {self.moment} {self.last_call}")


class TornStore:
    """A LocalStore whose `at_write`-th write (from 0) stops half-way: part of the body stays in a temporary file.

    This write and every later write raise `failure`: Crashed for a kill or a power cut, StoreDenied for a full disk on
    which even the clean-up fails.
    """

    def __init__(self, inner: ObjectStore, at_write: int, failure: BaseException) -> None:
        self._inner = inner
        self._left = at_write
        self._failure = failure

    @property
    def url(self) -> str:
        return self._inner.url

    def create(self, key: str, body: bytes) -> bool:
        self._before_write(key, body)
        return self._inner.create(key, body)

    def put(self, key: str, body: bytes) -> None:
        self._before_write(key, body)
        self._inner.put(key, body)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._inner.get(key, start, end)

    def list(self, prefix: str, after: str = "") -> list[str]:
        return self._inner.list(prefix, after)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def _before_write(self, key: str, body: bytes) -> None:
        self._left -= 1
        if self._left >= 0:
            return
        folder = (Path(self._inner.url) / key).parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / temporary_name()).write_bytes(body[: len(body) // 2])
        raise self._failure
