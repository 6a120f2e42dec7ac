"""The lines between simulated processes and their store: weather, crashes at a call, and what counts as trouble.

Every request of a process passes, from its side, a watch that notes failures, the faults of the weather, and perhaps a
crash at a drawn call. Below lies the ledger's view of the true store.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, Protocol

from simulation.simulated_session import Machine
from simulation.virtual_time import ProcessClock, Timeline
from storage.stores.faults import Crashed, CrashingStore, FaultRates, FaultyStore
from storage.stores.store import ObjectStore, StoreDenied, StoreUnavailable

MOMENTS: tuple[Literal["before", "after", "later"], ...] = ("before", "after", "later")
# A wait for the store of so many times its usual latency is a delay, and no longer the store's usual time.
UNUSUAL = 20


class Noting(Protocol):
    """What lines need of a ledger."""

    refuses: bool

    def now(self) -> float: ...

    def tell(self, who: str, what: str) -> None: ...

    def note_delay(self, _duration_s: float, /) -> None: ...

    def note_trouble(self, _who: str, _since_s: float, _until_s: float, /) -> None: ...

    def view(self, who: str) -> ObjectStore: ...


class Weathered(Protocol):
    """What lines need of a history."""

    @property
    def seed(self) -> int: ...

    @property
    def weather(self) -> FaultRates: ...

    @property
    def calm(self) -> FaultRates: ...

    @property
    def calm_at_s(self) -> float: ...

    @property
    def crashes(self) -> int: ...


def started(
    timeline: Timeline,
    ledger: Noting,
    seed: int,
    name: str,
    main: Callable[[Machine], object],
    on_end: Callable[[Machine, BaseException | None], object],
) -> Machine:
    """A process with a clock of its own, which begins at once."""
    process = Machine(timeline, name, main, on_end)
    process.clock = ProcessClock(timeline, process, random.Random(f"clock {seed} {name}"))
    timeline.after(0.0, process.start)
    ledger.tell(name, "starts")
    return process


class LineClock:
    """The clock of a connection to the store: a process's clock that notes every wait longer than `usual_s`."""

    def __init__(self, clock: ProcessClock, ledger: Noting, usual_s: float) -> None:
        self._clock = clock
        self._ledger = ledger
        self._usual_s = usual_s

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def wall(self) -> float:
        return self._clock.wall()

    def sleep(self, duration_s: float) -> None:
        if duration_s > self._usual_s:
            self._ledger.note_delay(duration_s)
        self._clock.sleep(duration_s)


class WatchedStore:
    """An ObjectStore above the faults, which notes as trouble every request that failed or took over `usual_s`."""

    def __init__(self, inner: ObjectStore, ledger: Noting, who: str, usual_s: float) -> None:
        self._inner = inner
        self._ledger = ledger
        self._who = who
        self._usual_s = usual_s

    @property
    def url(self) -> str:
        return self._inner.url

    def create(self, key: str, body: bytes) -> bool:
        with self._watched():
            return self._inner.create(key, body)

    def put(self, key: str, body: bytes) -> None:
        with self._watched():
            self._inner.put(key, body)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        with self._watched():
            return self._inner.get(key, start, end)

    def list(self, prefix: str, after: str = "") -> list[str]:
        with self._watched():
            return self._inner.list(prefix, after)

    def delete(self, key: str) -> None:
        with self._watched():
            self._inner.delete(key)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        began_s, failed = self._ledger.now(), False
        try:
            yield
        except (StoreUnavailable, StoreDenied):
            failed = True
            raise
        finally:
            if failed or self._ledger.now() - began_s > self._usual_s:
                self._ledger.note_trouble(self._who, began_s, self._ledger.now())


class LateClaims:
    """A store whose claims are under way for a while, as in a slow network; everything else is as below."""

    def __init__(self, inner: ObjectStore, wait: Callable[[], None]) -> None:
        self._inner = inner
        self._wait = wait

    @property
    def url(self) -> str:
        return self._inner.url

    def create(self, key: str, body: bytes) -> bool:
        if "/claims/" in key:
            self._wait()
        return self._inner.create(key, body)

    def put(self, key: str, body: bytes) -> None:
        self._inner.put(key, body)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._inner.get(key, start, end)

    def list(self, prefix: str, after: str = "") -> list[str]:
        return self._inner.list(prefix, after)

    def delete(self, key: str) -> None:
        self._inner.delete(key)


class Lines:
    """The connections of all processes of an iteration."""

    def __init__(self, history: Weathered, timeline: Timeline, ledger: Noting) -> None:
        self.refused_until_s = 0.0
        self._history = history
        self._timeline = timeline
        self._ledger = ledger
        self._weather = history.weather
        self._stores: dict[str, FaultyStore] = {}
        self._crashing: dict[str, CrashingStore] = {}
        self._crashes_left = history.crashes
        # The names under which each process reaches the store: its own, and those of members in it.
        self._names: dict[str, list[str]] = defaultdict(list)

    def connect(self, process: Machine, name: str) -> ObjectStore:
        """The store for a process, under the name of the process or of a member in it."""
        rng = random.Random(f"faults {self._history.seed} {name}")
        self._names[process.name].append(name)
        store: ObjectStore = self._ledger.view(name)
        if self._crashes_left and rng.random() < 0.4:
            self._crashes_left -= 1
            store = self._crashing[process.name] = self._crash_in_time(store, rng)
        usual_s = UNUSUAL * self._history.weather.latency_s
        line = LineClock(process.clock, self._ledger, usual_s)
        faulty = self._stores[name] = FaultyStore(store, self._weather, rng, line, self._later)
        return WatchedStore(faulty, self._ledger, name, usual_s)

    def connect_calmly(self, process: Machine, name: str) -> ObjectStore:
        """The store for a process that meets no faults, only latency."""
        return FaultyStore(self._ledger.view(process.name), self._history.calm, random.Random(name), process.clock)

    def change(self, rates: FaultRates, name: str) -> None:
        """Give all connections this weather."""
        self._ledger.tell("weather", name)
        self._weather = rates
        for store in self._stores.values():
            store.rates = rates

    def disturb(self, rates: FaultRates, name: str, duration_s: float) -> None:
        """Give all connections this weather for a while."""
        self.change(rates, name)
        if rates.denied or rates.full:
            self._ledger.refuses = True
            self.refused_until_s = max(self.refused_until_s, self._timeline.now_s + duration_s)
        self._timeline.after(duration_s, lambda: self._clear(f"{name} ends"))

    def note_stop(self, process: Machine, duration_s: float) -> None:
        """Note as trouble that a process stands still from now on."""
        now_s = self._timeline.now_s
        for name in self._names[process.name]:
            self._ledger.note_trouble(name, now_s, now_s + duration_s)

    def crashed_at(self, process: Machine) -> tuple[str, str] | None:
        """The call, and the moment of the call, at which the process crashed; None if it did not crash at a call."""
        crashing = self._crashing.get(process.name)
        return None if crashing is None or crashing.last_call is None else (crashing.moment, crashing.last_call)

    def faults(self) -> Counter[str]:
        """How often each fault struck."""
        counts: Counter[str] = Counter()
        for store in self._stores.values():
            counts.update({f"fault: {fault.value}": count for fault, count in store.struck.items()})
        return counts

    def _clear(self, name: str) -> None:
        is_calm = self._timeline.now_s >= self._history.calm_at_s
        self.change(self._history.calm if is_calm else self._history.weather, name)

    def _crash_in_time(self, store: ObjectStore, rng: random.Random) -> CrashingStore:
        """A store whose process dies at one of its first calls; half of the time at a write, as writes are few."""
        writes_only = rng.random() < 0.5
        at_call = int(rng.expovariate(1 / (6 if writes_only else 20)))
        moment, delay_s = rng.choice(MOMENTS), rng.uniform(0, 40)
        return CrashingStore(store, at_call, moment, writes_only=writes_only, later=self._later, delay_s=delay_s)

    def _later(self, delay_s: float, request: Callable[[], object]) -> None:
        def arrives() -> None:
            with suppress(Crashed):  # its process has died since, so the answer is lost
                request()

        self._timeline.after(delay_s, arrives)
