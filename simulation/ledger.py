"""Ledger: what really happened to the objects of a simulated run, in true order, and the rules broken at each moment.

It stands at the store, below the faults, and only the checks read it. It knows the keys and claims of iteration 0, but
not whether tokens are right.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from simulation.stored_objects import body_of
from storage import layout
from storage.memory import MemoryStore
from storage.store import ObjectMissing, ObjectStore, StoreUnavailable

Event = tuple[float, str, str]
WRITES = ("create", "put")


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat that reached the store."""

    at_s: float
    state: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim as read from its bytes (docs/format.md section 5), and the time when it reached the store."""

    at_s: float
    unit: int
    epoch: int
    incarnation: str
    responses: tuple[int, ...] | None
    sealed: dict[str, int]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens that an engine returned: `count` of a response from position `start` on; since_s: when it admitted it."""

    since_s: float
    at_s: float
    response: int
    start: int
    count: int


@dataclass(slots=True)
class Life:
    """The times of a process's first and last request to the store, and their number."""

    first_s: float
    last_s: float
    calls: int = 0


@dataclass
class Ledger:
    """The true store, and a record of which process did what to it when."""

    now: Callable[[], float]
    store: MemoryStore = field(default_factory=MemoryStore)
    events: list[Event] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    claims: list[Claim] = field(default_factory=list)
    beats: dict[str, list[Beat]] = field(default_factory=dict)
    lives: dict[str, Life] = field(default_factory=dict)
    created: dict[str, bytes] = field(default_factory=dict)
    looked_in_vain: set[tuple[str, str]] = field(default_factory=set)
    created_at_s: dict[str, float] = field(default_factory=dict)
    faults: list[tuple[float, float]] = field(default_factory=list)
    delays: list[tuple[float, float]] = field(default_factory=list)
    writes: Counter[str] = field(default_factory=Counter)
    admitted: dict[tuple[str, int], float] = field(default_factory=dict)
    decoded: dict[str, list[Decoded]] = field(default_factory=dict)
    troubles: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    ends: dict[str, tuple[float, str]] = field(default_factory=dict)
    used: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def is_closed(self) -> bool:
        """Whether the trainer has marked the iteration as closed."""
        return layout.closed(0) in self.created

    def tell(self, who: str, what: str) -> None:
        """Note an event for the trace."""
        self.events.append((self.now(), who, what))

    def note_fault(self, duration_s: float = 0.0) -> None:
        """Note a fault that begins now and lasts this long."""
        self.faults.append((self.now(), self.now() + duration_s))

    def note_delay(self, duration_s: float) -> None:
        """Note that a process's connection to the store is delayed from now on for this long."""
        self.delays.append((self.now(), duration_s))

    def note_admitted(self, who: str, response: int) -> None:
        """Note that a member's engine begins to decode a response now."""
        self.admitted[who, response] = self.now()

    def note_decoded(self, who: str, response: int, start: int, count: int) -> None:
        """Note that a member's engine has just returned tokens."""
        since_s = self.admitted[who, response]
        self.decoded.setdefault(who, []).append(Decoded(since_s, self.now(), response, start, count))

    def note_trouble(self, who: str, since_s: float, until_s: float) -> None:
        """Note that a process could not reach the store, or stood still."""
        self.troubles.setdefault(who, []).append((since_s, until_s))

    def is_troubled(self, who: str, since_s: float, until_s: float) -> bool:
        """Whether a process had trouble at any moment between these."""
        return any(begun_s <= until_s and ended_s >= since_s for begun_s, ended_s in self.troubles.get(who, ()))

    def breaks(self, rule: str) -> None:
        """Note a broken rule."""
        self.broken.append(rule)
        self.tell("CHECK", rule)

    def view(self, who: str) -> "LedgerView":
        """The store as one process reaches it."""
        return LedgerView(self, who)

    def note_creation(self, who: str, key: str, body: bytes) -> None:
        """Note a successful create, and check the object."""
        if self.created.setdefault(key, body) != body:
            self.breaks(f"doubled: {key} was created twice with different bytes")
        self.created_at_s.setdefault(key, self.now())
        if "/claims/" in key:
            claim = self._read_claim(key, body)
            self.claims.append(claim)
            self._check_seals(who, key, claim.sealed)
        elif "/journal/" in key:
            self._check_order(key)

    def _check_order(self, key: str) -> None:
        """Check that a shard's predecessor was written before; otherwise readers never reach it (algorithm J)."""
        incarnation, name = key.split("/")[-2:]
        number = int(name.removesuffix(".arrow"))
        if number and layout.shard(0, incarnation, number - 1) not in self.created:
            self.breaks(f"lost: {key} was written behind a gap")

    def _read_claim(self, key: str, body: bytes) -> Claim:
        found = body_of(key, "claim", body)
        responses = None if found["responses"] is None else tuple(found["responses"])
        return Claim(self.now(), found["unit"], found["epoch"], found["incarnation"], responses, found["sealed"])

    def _check_seals(self, who: str, key: str, sealed: dict[str, int]) -> None:
        """Check that each seal is the number before the first shard not found (docs/format.md, algorithms A and J)."""
        for name, last in sealed.items():
            following = layout.shard(0, name, last + 1)
            if last >= 0 and layout.shard(0, name, last) not in self.created:
                self.breaks(f"lost: {key} seals {name} at {last}, a shard that is not there")
            if (who, following) not in self.looked_in_vain:
                self.breaks(f"lost: {key} seals {name} at {last} without having looked for shard {last + 1}")


class LedgerView:
    """An ObjectStore that records every request in the ledger."""

    def __init__(self, ledger: Ledger, who: str) -> None:
        self._ledger = ledger
        self._store = ledger.store
        self._who = who

    @property
    def url(self) -> str:
        return self._store.url

    def create(self, key: str, body: bytes) -> bool:
        fresh = self._store.create(key, body)
        self._note("create", key, "" if fresh else " exists")
        if fresh:
            self._ledger.note_creation(self._who, key, body)
        return fresh

    def put(self, key: str, body: bytes) -> None:
        self._store.put(key, body)
        if "/alive/" in key:
            state = body_of(key, "heartbeat", body)["state"]
            name = key.rsplit("/", 1)[1].removesuffix(".json")
            self._ledger.beats.setdefault(name, []).append(Beat(self._ledger.now(), state))
            self._note("put", key, f" {state}")
        elif "/ended/" in key or "/failures/" in key or key.startswith(layout.PROBE):  # these are not about tokens
            self._note("put", key, "")
        else:
            self._ledger.breaks(f"doubled: {self._who} overwrote {key}")

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        try:
            body = self._store.get(key, start, end)
        except ObjectMissing:
            self._ledger.looked_in_vain.add((self._who, key))
            self._note("get", key, " missing")
            raise
        self._note("get", key, "")
        return body

    def list(self, prefix: str, after: str = "") -> list[str]:
        keys = self._store.list(prefix, after)
        self._note("list", prefix, f" {len(keys)} keys")
        return keys

    def delete(self, key: str) -> None:
        self._store.delete(key)
        if key.startswith(layout.PROBE):
            self._note("delete", key, "")
            return
        self._ledger.breaks(f"lost: {self._who} deleted {key}")

    def _note(self, verb: str, key: str, outcome: str) -> None:
        ledger, now_s = self._ledger, self._ledger.now()
        life = ledger.lives.setdefault(self._who, Life(now_s, now_s))
        life.last_s = now_s
        life.calls += 1
        ledger.calls[verb] += 1
        if verb in WRITES:
            ledger.writes[self._who] += 1
        ledger.events.append((now_s, self._who, f"{verb} {key}{outcome}"))


class WatchedStore:
    """An ObjectStore above the faults, which notes as trouble every request that failed or took over `usual_s`."""

    def __init__(self, inner: ObjectStore, ledger: Ledger, who: str, usual_s: float) -> None:
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
        except StoreUnavailable:
            failed = True
            raise
        finally:
            if failed or self._ledger.now() - began_s > self._usual_s:
                self._ledger.note_trouble(self._who, began_s, self._ledger.now())
