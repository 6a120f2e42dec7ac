"""Ledger: what really happened to the objects of a simulated run, in true order, and the rules broken at each moment.

It stands at the store, below the faults, and only the checks read it. It knows the keys and claims of one iteration,
but not whether tokens are right. The ledgers of a run's iterations share one store; ledger_of_run.py has the rest.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from simulation.stored_objects import body_of
from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectMissing, ObjectStore
from tasks.turns.scripted_environments import ToolServer

PROBE_NAME = re.compile(rf"{layout.PROBE}\w+")
Event = tuple[float, str, str]
WRITES = ("create", "put")
# What may be overwritten, and is not about tokens.
OVERWRITTEN = ("/ended/", "/failures/", layout.PROBE, layout.SETTINGS, layout.LEASE_BEAT)


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
    """Tokens that an engine returned.

    Attributes:
        since_s: when the engine admitted the response.
        at_s: when the tokens were returned.
        start, count: position of the first token, and number of tokens.
    """

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
    """The true store, and a record of which process did what to an iteration's objects when.

    Attributes:
        now: true time since the iteration's beginning at zero_s.
        closes: called when the iteration is closed.
        of: maps a key to its ledger; None: this ledger has every key.
        deletes: called with process and key ahead of a deletion; returns whether the deletion is allowed.
        deleted: bodies of objects at their first deletion.
    """

    now: Callable[[], float]
    iteration: int = 0
    zero_s: float = 0.0
    closes: Callable[[], None] = lambda: None
    of: "Callable[[str], Ledger] | None" = None
    deletes: Callable[[str, str], bool] = lambda _who, _key: False
    deleted: dict[str, bytes] = field(default_factory=dict)
    store: MemoryStore = field(default_factory=MemoryStore)
    events: list[Event] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    claims: list[Claim] = field(default_factory=list)
    beats: dict[str, list[Beat]] = field(default_factory=dict)
    # Which heartbeats each process has read, and when.
    beats_read: dict[str, list[tuple[float, str, bytes]]] = field(default_factory=dict)
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
    lease_beats_s: list[float] = field(default_factory=list)  # in true time
    server: ToolServer = field(init=False)
    refuses: bool = False  # whether the store has refused requests for a while

    def __post_init__(self) -> None:
        self.server = ToolServer(self.now)

    @property
    def is_closed(self) -> bool:
        """Whether the trainer has marked the iteration as closed."""
        return layout.closed(self.iteration) in self.created

    def written(self) -> ObjectStore:
        """The iteration's objects, as if retention had deleted none."""
        if not self.deleted:
            return self.store
        whole = MemoryStore()
        left = {key: self.store.get(key) for key in self.store.list(layout.iteration(self.iteration))}
        for key, body in (left | self.deleted).items():
            # A claim beside deleted ones is void.
            if "/claims/" not in key or key in self.created:
                whole.put(key, body)
        return whole

    def tell(self, who: str, what: str) -> None:
        """Note an event for the trace; random names of probes are left out, to have a single trace per seed."""
        if layout.PROBE in what:
            what = PROBE_NAME.sub(layout.PROBE, what)
        self.events.append((self.zero_s + self.now(), who, what))

    def note_fault(self, duration_s: float = 0.0) -> None:
        """Note a fault from now on, for `duration_s`."""
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

    def own(self, key: str) -> str:
        """A key of this ledger as its writer names it."""
        return key

    def view(self, who: str) -> "LedgerView":
        """The store as one process reaches it."""
        return LedgerView(self, who)

    def note_creation(self, who: str, key: str, body: bytes) -> None:
        """Note a successful create, and check the object.

        What is created again after its deletion is void, and so is a claim once retention has begun to delete.
        """
        key = self.own(key)
        if key in self.deleted or ("/claims/" in key and self.deleted):
            return
        if self.created.setdefault(key, body) != body:
            self.breaks(f"doubled: {key} was created twice with different bytes")
        self.created_at_s.setdefault(key, self.now())
        if "/claims/" in key:
            claim = self._read_claim(key, body)
            self.claims.append(claim)
            self._check_seals(who, key, claim.sealed)
        elif "/journal/" in key:
            self._check_order(key)
        elif key == layout.closed(self.iteration):
            self.closes()

    def _check_order(self, key: str) -> None:
        """Check that a shard's predecessor was written before; otherwise readers never reach it (algorithm J)."""
        incarnation, name = key.split("/")[-2:]
        number = int(name.removesuffix(".arrow"))
        if number and layout.shard(self.iteration, incarnation, number - 1) not in self.created:
            self.breaks(f"lost: {key} was written behind a gap")

    def _read_claim(self, key: str, body: bytes) -> Claim:
        found = body_of(key, "claim", body)
        responses = None if found["responses"] is None else tuple(found["responses"])
        return Claim(self.now(), found["unit"], found["epoch"], found["incarnation"], responses, found["sealed"])

    def _check_seals(self, who: str, key: str, sealed: dict[str, int]) -> None:
        """Check that each seal is the number before the first shard not found (docs/format.md, algorithms A and J)."""
        for name, last in sealed.items():
            following = layout.shard(self.iteration, name, last + 1)
            if last >= 0 and layout.shard(self.iteration, name, last) not in self.created:
                self.breaks(f"lost: {key} seals {name} at {last}, a shard that is not there")
            if (who, following) not in self.looked_in_vain:
                self.breaks(f"lost: {key} seals {name} at {last} without having looked for shard {last + 1}")


class LedgerView:
    """An ObjectStore that records every request in the ledgers."""

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
            self._of(key).note_creation(self._who, key, body)
        return fresh

    def put(self, key: str, body: bytes) -> None:
        self._store.put(key, body)
        if "/alive/" in key:
            ledger = self._of(key)
            state = body_of(ledger.own(key), "heartbeat", body)["state"]
            name = key.rsplit("/", 1)[1].removesuffix(".json")
            ledger.beats.setdefault(name, []).append(Beat(ledger.now(), state))
            self._note("put", key, f" {state}")
            return
        self._note("put", key, "")
        if key == layout.LEASE_BEAT:
            self._ledger.lease_beats_s.append(self._ledger.zero_s + self._ledger.now())
        if not any(part in key for part in OVERWRITTEN):
            self._ledger.breaks(f"doubled: {self._who} overwrote {key}")

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        try:
            body = self._store.get(key, start, end)
        except ObjectMissing:
            ledger = self._of(key)
            ledger.looked_in_vain.add((self._who, ledger.own(key)))
            self._note("get", key, " missing")
            raise
        self._note("get", key, "")
        if "/alive/" in key:
            ledger = self._of(key)
            ledger.beats_read.setdefault(self._who, []).append((ledger.now(), key, body))
        return body

    def list(self, prefix: str, after: str = "") -> list[str]:
        keys = self._store.list(prefix, after)
        self._note("list", prefix, f" {len(keys)} keys")
        return keys

    def delete(self, key: str) -> None:
        if not key.startswith(layout.PROBE) and not self._ledger.deletes(self._who, key):
            self._ledger.breaks(f"lost: {self._who} deleted {key}")
        self._store.delete(key)
        self._note("delete", key, "")

    def _of(self, key: str) -> Ledger:
        return self._ledger if self._ledger.of is None else self._ledger.of(key)

    def _note(self, verb: str, key: str, outcome: str) -> None:
        ledger, now_s = self._ledger, self._ledger.now()
        life = ledger.lives.setdefault(self._who, Life(now_s, now_s))
        life.last_s = now_s
        life.calls += not key.startswith(layout.WEIGHTS)
        ledger.calls[verb] += 1
        if verb in WRITES:
            ledger.writes[self._who] += 1
        ledger.tell(self._who, f"{verb} {key}{outcome}")
