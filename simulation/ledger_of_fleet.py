"""What really happened to a fleet and its runs, in true order, and the rules that are broken at each moment.

The fleet and its runs lie in one true store, each below a folder of its own. The ledger stands below the faults; of the
workers it is told directly what they do. Only the checks read it.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from storage import fleet_layout, layout, records
from storage.fleet_records import Tier
from storage.memory import MemoryStore
from storage.run import exists
from storage.weights.manifest import Manifest
from tasks.sharing.workers import Restored

FLEET = "fleet/"
MEMBER = "a member"
# The fastest clock of a process runs so many times as fast as true time, the slowest so many.
FASTEST_CLOCK, SLOWEST_CLOCK = 1.15, 0.85


def run_folder(number: int) -> str:
    """The folder of a run."""
    return f"run{number}"


@dataclass
class HostLife:
    """An incarnation of a host: true times, and its monotonic clock at its beginning and its end.

    device: which run has its device now, or a member, since device_since_s. device_s: how long each run had it before.
    helped_s: how long a member had it for each run; helps: how often. phases: how many phases it began. under_way:
    when each run's present phase began, until its worker has no more to do for it; ended: when others began and ended.
    restored: how its workers restored states, by run, iteration, tier, and whether ahead. calls: its requests. beats:
    true times at which its heartbeat changed. last_beat: its last own one. said_gone: whether that was written.
    ended_s: None if it lives.
    """

    began_s: float
    clock_began_s: float
    ended_s: float | None = None
    clock_ended_s: float | None = None
    device: str | None = None
    device_since_s: float = 0.0
    device_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    helped_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    helps: int = 0
    phases: int = 0
    under_way: dict[str, float] = field(default_factory=dict)
    ended: list[tuple[float, float]] = field(default_factory=list)
    restored: Counter[tuple[str, int, Tier, bool]] = field(default_factory=Counter)
    calls: int = 0
    beats: list[float] = field(default_factory=list)
    last_beat: bytes | None = None
    said_gone: bool = False


class LedgerOfFleet:
    """now: true time. runs: the folder of each run by its id. hosts: the incarnations of hosts by name."""

    def __init__(self, now: Callable[[], float], host_ttl_s: float) -> None:
        self.now = now
        self._host_ttl_s = host_ttl_s
        self.store = MemoryStore()
        self.events: list[tuple[float, str, str]] = []
        self.broken: list[str] = []
        self.counts: Counter[str] = Counter()
        self.faults = 0
        self.runs: dict[str, str] = {}
        self.hosts: dict[str, HostLife] = {}
        self.refuses = False
        self.computed: Counter[tuple[str, int]] = Counter()
        self.published: Counter[tuple[str, int]] = Counter()
        # By run and version: the metadata and the digest of what was first stored.
        self.checkpoints: dict[tuple[str, int], tuple[dict[str, Any], str]] = {}
        self.seats: defaultdict[str, list[str]] = defaultdict(list)

    def tell(self, who: str, what: str) -> None:
        """Note an event for the trace."""
        self.events.append((self.now(), who, what))

    def breaks(self, rule: str) -> None:
        """Note a broken rule."""
        self.broken.append(rule)
        self.tell("CHECK", rule)

    def note_fault(self, what: str, times: int = 1) -> None:
        """Note a fault, after each of which so many phases may have to be computed again."""
        self.faults += times
        self.counts[f"fault: {what}"] += 1

    def note_delay(self, _duration_s: float) -> None:
        """Count a wait for the store that is longer than usual."""
        self.counts["delays"] += 1

    def note_trouble(self, _who: str, _since_s: float, _until_s: float) -> None:
        """Count a request that failed or took long."""
        self.counts["troubles"] += 1

    def view(self, who: str) -> "RecordedFleetStore":
        """The true store as one process reaches it."""
        return RecordedFleetStore(self, who)

    def exists(self, run: str, key: str) -> bool:
        """Whether a run really has an object."""
        return exists(self.store, f"{self.runs[run]}/{key}")

    # What the workers do.

    def note_begun(self, host: str, run: str, iteration: int) -> None:
        """Check a phase that a host begins now."""
        life = self.hosts[host]
        life.phases += 1
        self.tell(host, f"begins {self.runs[run]} {iteration}")
        if life.device is not None:
            self.breaks(f"doubled: {host} begins {run} while {life.device} has its device")
        if not self.exists(run, layout.due(iteration)):
            self.breaks(f"early: {host} begins iteration {iteration} of {self.runs[run]}, which is not due")
        life.device, life.device_since_s = run, self.now()
        life.under_way[run] = self.now()

    def note_over(self, host: str, run: str) -> None:
        """Note that a run's worker has no more to do for its phase: it is published, or was given up."""
        began_s = self.hosts[host].under_way.pop(run, None)
        if began_s is not None:
            self.hosts[host].ended.append((began_s, self.now()))

    def note_trained(self, run: str, iteration: int) -> None:
        """Note that a phase begins to be computed."""
        self.computed[run, iteration] += 1

    def note_freed(self, host: str, run: str) -> None:
        """Note that a run's worker no longer has the device."""
        life = self.hosts[host]
        if life.device == run:
            life.device_s[run] += self.now() - life.device_since_s
            life.device = None

    def note_helped(self, host: str, run: str) -> None:
        """Check a member that a host starts now to generate for a run."""
        life = self.hosts[host]
        life.helps += 1
        self.counts["members started"] += 1
        self.tell(host, f"lets a member generate for {self.runs[run]}")
        if life.device is not None:
            self.breaks(f"doubled: {host} lets a member generate while {life.device} has its device")
        life.device, life.device_since_s = MEMBER, self.now()

    def note_left(self, host: str, run: str) -> None:
        """Note that the member for a run no longer has the device."""
        life = self.hosts[host]
        if life.device == MEMBER:
            life.helped_s[run] += self.now() - life.device_since_s
            life.device = None

    def note_resident(self, host: str, run: str, digest: str | None, stored: str) -> None:
        """Check a resident state that is used in place of a checkpoint."""
        self.counts["resident states used"] += 1
        if digest != stored:
            self.breaks(f"resident: {host} goes on from {digest} with {self.runs[run]}, whose checkpoint is {stored}")

    def note_restored(self, host: str, run: str, iteration: int, how: Restored) -> None:
        """Note that a run's worker has got its state."""
        self.hosts[host].restored[run, iteration, how.tier, how.ahead] += 1
        self.counts[f"states from the {how.tier}{', ahead' if how.ahead else ''}"] += 1

    def note_read(self, host: str, run: str, key: str, body: bytes) -> None:
        """Check a part of a state that was read, from the store or from a copy; `body` ends what is stored."""
        if not self.store.get(f"{self.runs[run]}/{key}").endswith(body):
            self.breaks(f"copy: {host} goes on from other bytes than {key} of {self.runs[run]} has")

    # What reaches the store.

    def note_written(self, who: str, verb: str, key: str, body: bytes, *, fresh: bool) -> None:
        """Check a write."""
        if key.startswith(f"{FLEET}{fleet_layout.ALIVE}"):
            self._note_beat(who, key.removeprefix(f"{FLEET}{fleet_layout.ALIVE}").removesuffix(".json"), body)
            return
        if not fresh and verb == "create":
            return
        if verb == "put":
            self.breaks(f"doubled: {who} overwrote {key}")
        seat = fleet_layout.seat_address(key.removeprefix(FLEET))
        if seat is not None:
            self._check_seat(who, *seat)
        folder, _, rest = key.partition("/")
        run = next((run for run, its in self.runs.items() if its == folder), None)
        if run is not None:
            self._note_version(run, rest, body)

    def _note_version(self, run: str, key: str, body: bytes) -> None:
        """Note a manifest of a run, unless the iteration was committed before.

        A host that was frozen may store one again that the run has deleted since; it is of no use, and does no harm.
        """
        for prefix, folder in ((layout.WEIGHTS, layout.weights), (layout.CHECKPOINTS, layout.checkpoint)):
            version = key.removeprefix(prefix).partition("/")[0]
            if not version.isdecimal() or key != layout.manifest(folder(int(version))):
                continue
            if int(version) and self.exists(run, layout.report(int(version) - 1)):
                self.counts["manifests stored again after a commit"] += 1
            elif prefix == layout.CHECKPOINTS:
                manifest = records.decode(Manifest, key, body)
                self.checkpoints.setdefault((run, int(version)), (manifest.metadata, manifest.digest))
            elif int(version):
                self.published[run, int(version) - 1] += 1

    def _note_beat(self, who: str, host: str, body: bytes) -> None:
        life = self.hosts[host]
        life.beats.append(self.now())
        if who == host:
            life.last_beat = body
            life.said_gone = life.said_gone or b'"state":"gone"' in body

    def _check_seat(self, host: str, run: str, epoch: int) -> None:
        """Check that a seat is taken in order, and from no host that never was silent for a TTL."""
        holders = self.seats[run]
        if epoch != len(holders) + 1:
            self.breaks(f"doubled: {host} takes epoch {epoch} of {run} after {len(holders)}")
        if holders and not self._was_silent(holders[-1]):
            self.breaks(f"hasty: {host} takes the seat of {run} from {holders[-1]}, which never was silent for so long")
        if holders:
            self.counts["seats taken over"] += 1
        holders.append(host)

    def _was_silent(self, host: str) -> bool:
        """Whether a host has said that it is gone, or its heartbeat did not change for a TTL of the fastest clock."""
        life = self.hosts[host]
        moments = [life.began_s, *life.beats, self.now()]
        longest_s = max(after - before for before, after in itertools.pairwise(moments))
        return life.said_gone or longest_s >= self._host_ttl_s / FASTEST_CLOCK


class RecordedFleetStore:
    """An ObjectStore that records every request of one process in the ledger."""

    def __init__(self, ledger: LedgerOfFleet, who: str) -> None:
        self._ledger = ledger
        self._store = ledger.store
        self._who = who

    @property
    def url(self) -> str:
        return self._store.url

    def create(self, key: str, body: bytes) -> bool:
        fresh = self._store.create(key, body)
        self._note("create", key, "" if fresh else " exists")
        self._ledger.note_written(self._who, "create", key, body, fresh=fresh)
        return fresh

    def put(self, key: str, body: bytes) -> None:
        self._store.put(key, body)
        self._note("put", key, "")
        self._ledger.note_written(self._who, "put", key, body, fresh=True)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._note("get", key, "")
        return self._store.get(key, start, end)

    def list(self, prefix: str, after: str = "") -> list[str]:
        self._note("list", prefix, "")
        return self._store.list(prefix, after)

    def delete(self, key: str) -> None:
        self._store.delete(key)
        self._note("delete", key, "")

    def _note(self, verb: str, key: str, outcome: str) -> None:
        self._ledger.tell(self._who, f"{verb} {key}{outcome}")
        if self._who in self._ledger.hosts:
            self._ledger.hosts[self._who].calls += 1
