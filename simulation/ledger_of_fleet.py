"""What really happened to a fleet and its runs, in true order, and the rules that are broken at each moment.

The fleet and its runs lie in one true store, each below a folder of its own. The ledger stands below the faults;
workers report to it directly. Only the checks read the ledger.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from storage.clock import Clock
from storage.fleet import fleet_layout
from storage.fleet.spent_records import Tier
from storage.records import layout, records
from storage.records.run import exists
from storage.stores.memory import MemoryStore
from storage.weights.manifest import Manifest
from tasks.sharing.workers import Restored, WorkerPhase

FLEET = "fleet/"
MEMBER = "a member"
# The fastest clock of a process runs so many times as fast as true time, the slowest so many.
FASTEST_CLOCK, SLOWEST_CLOCK = 1.15, 0.85
# What a device is used for: a run, and the iteration that is trained; None: a member generates for the run.
Use = tuple[str, int | None]


def run_folder(number: int) -> str:
    """The folder of a run."""
    return f"run{number}"


@dataclass
class HostLife:
    """An incarnation of a host: true times, and times of the monotonic clock of its machine.

    Attributes:
        began_s, ended_s: true times; None: the host lives.
        clock_began_s, clock_ended_s: begin and end by `clock`.
        clock: the clock of the machine.
        stays_s: seconds by the clock that the host is told to serve; None: until the end.
        device, device_since_s, iteration: the run (or member) on the device now, since when, and for which iteration.
        device_s: earlier seconds of each run on the device, by iteration; iteration None: a member had it for the run.
        stages_s: seconds of each stage of each run's workers on the device.
        begun, last_begun_s: number of begun phases by use, and the host's own time of the last beginning.
        under_way: when each run's present phase began, until its worker has no more to do for it.
        ended: (begin, end) of earlier phases.
        restored: how workers restored states, by run, iteration, tier, and whether ahead.
        seated: (begin, end) of each run's seats on the host, in its own seconds.
        asked: whether the seat of a run was still the host's at its last look.
        calls: its requests.
        beats, last_beat: true times at which the heartbeat changed, and the last heartbeat written.
        said_leaving, said_gone: whether this state was written.
        told_to_end_s: the host's own time of the first order to end.
    """

    began_s: float
    clock_began_s: float
    clock: Clock
    stays_s: float | None
    ended_s: float | None = None
    clock_ended_s: float | None = None
    device: str | None = None
    device_since_s: float = 0.0
    iteration: int | None = None
    device_s: defaultdict[Use, float] = field(default_factory=lambda: defaultdict(float))
    stages_s: defaultdict[tuple[str, WorkerPhase], float] = field(default_factory=lambda: defaultdict(float))
    begun: Counter[Use] = field(default_factory=Counter)
    last_begun_s: float = 0.0
    under_way: dict[str, float] = field(default_factory=dict)
    ended: list[tuple[float, float]] = field(default_factory=list)
    restored: Counter[tuple[str, int, Tier, bool]] = field(default_factory=Counter)
    seated: defaultdict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    asked: dict[str, bool] = field(default_factory=dict)
    calls: int = 0
    beats: list[float] = field(default_factory=list)
    last_beat: bytes | None = None
    said_leaving: bool = False
    said_gone: bool = False
    told_to_end_s: float = math.inf

    @property
    def phases(self) -> int:
        """How many phases it began."""
        return sum(times for (_, iteration), times in self.begun.items() if iteration is not None)

    def lived_s(self) -> float:
        """How long it lives by its own clock."""
        return self.clock.monotonic() - self.clock_began_s

    @property
    def ends(self) -> bool:
        """True if the host is to end, by an order or because its hours are over."""
        return self.lived_s() >= self.serves_s

    @property
    def serves_s(self) -> float:
        """For how long of its own seconds it looks for runs, and begins phases."""
        return self.told_to_end_s if self.stays_s is None else min(self.told_to_end_s, self.stays_s)


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
        self.weights: dict[tuple[str, int], str] = {}
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
        life.begun[run, iteration] += 1
        life.last_begun_s = life.lived_s()
        self.tell(host, f"begins {self.runs[run]} {iteration}")
        if not life.asked.pop(run, False):
            self.breaks(
                f"seat: {host} begins {self.runs[run]} and has not asked, or was told no, whether it is its own"
            )
        if life.said_leaving:
            self.breaks(f"stay: {host} begins {self.runs[run]} after it said that it leaves")
        if life.device is not None:
            self.breaks(f"doubled: {host} begins {run} while {life.device} has its device")
        if not self.exists(run, layout.due(iteration)):
            self.breaks(f"early: {host} begins iteration {iteration} of {self.runs[run]}, which is not due")
        life.device, life.device_since_s, life.iteration = run, self.now(), iteration
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
            life.device_s[run, life.iteration] += self.now() - life.device_since_s
            life.device = None

    def note_stage(self, host: str, run: str, stage: WorkerPhase, since_s: float) -> None:
        """Note what a run's worker did since then, and no longer does."""
        self.hosts[host].stages_s[run, stage] += self.now() - since_s

    def note_helped(self, host: str, run: str) -> None:
        """Check a member that a host starts now to generate for a run."""
        life = self.hosts[host]
        life.begun[run, None] += 1
        self.counts["members started"] += 1
        self.tell(host, f"lets a member generate for {self.runs[run]}")
        if life.device is not None:
            self.breaks(f"doubled: {host} lets a member generate while {life.device} has its device")
        life.device, life.device_since_s = MEMBER, self.now()

    def note_left(self, host: str, run: str) -> None:
        """Note that the member for a run no longer has the device."""
        life = self.hosts[host]
        if life.device == MEMBER:
            life.device_s[run, None] += self.now() - life.device_since_s
            life.device = None

    def check_dropped(self, host: str, run: str) -> None:
        """Check that a host may end the worker of a run now, with its state, although its memory holds all states."""
        life = self.hosts[host]
        has_left = exists(self.store, f"{FLEET}{fleet_layout.left(run)}")
        if not life.ends and not has_left and any(until_s == math.inf for _, until_s in life.seated.get(run, ())):
            self.breaks(f"memory: {host} drops the state of {self.runs[run]}, which is seated there and fits")

    def note_read_ahead(self, host: str, run: str, iteration: int) -> None:
        """Check that a host may read a state into its memory now, ahead of its phase."""
        if not self.exists(run, layout.plan(iteration)):
            self.breaks(
                f"early: {host} reads ahead for iteration {iteration} of {self.runs[run]}, which is not planned"
            )

    def note_state(self, host: str, run: str, iteration: int, digest: str | None, *, resident: bool) -> None:
        """Check a restored or read-ahead state of a phase against the state that was stored first.

        After the report, no result of the phase counts.
        """
        self.counts["resident states used"] += resident
        stored = self.states(run, iteration)
        if digest not in stored and not self.exists(run, layout.report(iteration)):
            self.breaks(
                f"{'resident' if resident else 'stale'}: {host} goes on from {digest} with iteration {iteration} of "
                f"{self.runs[run]}, whose checkpoint or weights are {stored}"
            )

    def states(self, run: str, version: int) -> list[str]:
        """The digests by which the stored state of a version may be known: of its checkpoint, and of its weights."""
        checkpoint, weights = self.checkpoints.get((run, version)), self.weights.get((run, version))
        return [*([] if checkpoint is None else [checkpoint[1]]), *([] if weights is None else [weights])]

    def note_restored(self, host: str, run: str, iteration: int, how: Restored) -> None:
        """Note that the worker of a run has restored the run's state."""
        self.hosts[host].restored[run, iteration, how.tier, how.ahead] += 1
        self.counts[f"states from the {how.tier}{', ahead' if how.ahead else ''}"] += 1

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
        for each in self.runs:
            if key == f"{FLEET}{fleet_layout.left(each)}":
                self._end_seat(each)
        folder, _, rest = key.partition("/")
        run = next((run for run, its in self.runs.items() if its == folder), None)
        if run is not None:
            self._note_version(run, rest, body)

    def _note_version(self, run: str, key: str, body: bytes) -> None:
        """Note a manifest of a run, but not weights of an iteration that was committed before.

        A frozen host may store a version again after the run has deleted it, which is useless and harmless.
        """
        for prefix, folder in ((layout.WEIGHTS, layout.weights), (layout.CHECKPOINTS, layout.checkpoint)):
            version = key.removeprefix(prefix).partition("/")[0]
            if not version.isdecimal() or key != layout.manifest(folder(int(version))):
                continue
            manifest = records.decode(Manifest, key, body)
            if prefix == layout.CHECKPOINTS:
                # It is written beside the next rollout, so the report may be there.
                self.checkpoints.setdefault((run, int(version)), (manifest.metadata, manifest.digest))
            elif int(version) and self.exists(run, layout.report(int(version) - 1)):
                self.counts["manifests stored again after a commit"] += 1
            elif int(version):
                self.weights.setdefault((run, int(version)), manifest.digest)
                self.published[run, int(version) - 1] += 1

    def _note_beat(self, who: str, host: str, body: bytes) -> None:
        life = self.hosts[host]
        life.beats.append(self.now())
        if who == host:
            life.last_beat = body
            life.said_leaving = life.said_leaving or b'"state":"leaving"' in body
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
        self._end_seat(run)
        self.hosts[host].seated[run].append([self.hosts[host].lived_s(), math.inf])
        holders.append(host)

    def _end_seat(self, run: str) -> None:
        """The host that has the seat of a run loses it now."""
        if self.seats[run]:
            life = self.hosts[self.seats[run][-1]]
            life.seated[run][-1][1] = min(life.seated[run][-1][1], life.lived_s())

    def note_asked(self, host: str, key: str) -> None:
        """Note the answer if a host asks now whether another has taken a seat."""
        address = fleet_layout.seat_address(key.removeprefix(FLEET))
        if address is not None and host in self.hosts:
            run, epoch = address
            self.hosts[host].asked[run] = self.seats[run][-1:] == [host] and epoch > len(self.seats[run])

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
        self._ledger.note_asked(self._who, key)
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
