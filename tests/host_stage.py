"""A production host on a stage: scripted workers, and a clock at which a test makes things happen."""

import heapq
import itertools

from storage.clock import ManualClock
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import DueRecord, HostBeat
from storage.fleet.spent_records import SpentRecord
from storage.records import layout, records
from storage.records.records import RunRecord
from storage.stores.memory import NestedStore
from tasks.sharing.host import Host
from tasks.sharing.host_settings import HostSettings
from tasks.sharing.workers import Restored, WorkerState
from tests.fleet_records import FLEET, a_host, a_run

A, B, C = (a_run(name, state_bytes=4) for name in "abc")
RUN = RunRecord(config={}, digest="0" * 32, vocab_size=1, model_files={}, created_at_s=0.0)
SWITCH_S, TRAIN_S, PARK_S, PUBLISH_S, READ_S = 2.0, 10.0, 1.0, 5.0, 4.0


class EventfulClock(ManualClock):
    """While it sleeps, what was scheduled happens."""

    def __init__(self):
        super().__init__(500.0)
        self.agenda, self.numbers = [], itertools.count()

    def at(self, when_s, action):
        heapq.heappush(self.agenda, (500.0 + when_s, next(self.numbers), action))

    def sleep(self, duration_s):
        until_s = self.monotonic() + duration_s
        while self.agenda and self.agenda[0][0] <= until_s:
            at_s, _, action = heapq.heappop(self.agenda)
            self.advance(max(0.0, at_s - self.monotonic()))
            action()
        self.advance(max(0.0, until_s - self.monotonic()))


class ScriptedWorkers:
    """Phases of fixed duration. hang: runs whose training does not end. fail: runs whose next training fails. broken:
    those of them whose every training fails. lasting: runs of which every training would. replays: how many iterations
    of a run are trained again before its own.

    prefetched: (run, iteration, second) of each state that is to be read ahead, which takes READ_S. unreadable: runs
    whose states cannot be. evicted_at_s: the second at which each run's worker was first ended.
    """

    def __init__(self, clock, store_of):
        self.clock, self.store_of = clock, store_of
        self.begun, self.evicted, self.killed = [], [], []
        self.at, self.digests, self.hang, self.fail, self.lasting = {}, {}, set(), set(), set()
        self.broken = set()
        self.failed, self.reads, self.replays, self.evicted_at_s = {}, {}, {}, {}
        self.prefetched, self.unreadable = [], set()

    def begin(self, run, iteration):
        assert not any(self.state(name).has_device for name in self.at)
        assert self.state(run.id).phase != "prefetching"
        self.reads.pop(run.id, None)
        self.begun.append((run.run_url[-1], iteration, self.clock.monotonic() - 500.0))
        self.at[run.id] = (self.clock.monotonic(), run, iteration)
        self.failed.pop(run.id, None)

    def prefetch(self, run, iteration):
        assert not self.state(run.id).is_busy
        self.prefetched.append((run.run_url[-1], iteration, self.clock.monotonic() - 500.0))
        self.at.pop(run.id, None)
        self.reads[run.id] = (self.clock.monotonic(), run, iteration)

    def read_ahead(self, since_s, run, iteration):
        if self.clock.monotonic() < since_s + READ_S:
            return WorkerState(phase="prefetching", iteration=iteration)
        if run.id in self.unreadable:
            return WorkerState(phase="parked", iteration=iteration)
        how = Restored(tier="object store", seconds=READ_S, num_bytes=run.state_bytes, ahead=True)
        return WorkerState(phase="parked", iteration=iteration, bytes_held=run.state_bytes, restored=how)

    def state(self, run_id):
        if run_id in self.failed:
            message, iteration = self.failed[run_id]
            lasting = run_id in self.lasting
            return WorkerState(phase="failed", iteration=iteration, message=message, lasting=lasting)
        if run_id in self.reads:
            return self.read_ahead(*self.reads[run_id])
        if run_id not in self.at:
            return WorkerState()
        since_s, run, iteration = self.at[run_id]
        passed_s = self.clock.monotonic() - since_s
        if run_id in self.fail and passed_s > SWITCH_S:
            if run_id not in self.broken:
                self.fail.discard(run_id)
            del self.at[run_id]
            self.failed[run_id] = ("it broke", iteration)
            return self.state(run_id)
        train_s = 1e9 if run_id in self.hang else TRAIN_S
        replays = self.replays.get(run_id, 0)
        on_device = (("restoring", SWITCH_S), ("replaying", replays * TRAIN_S), ("training", train_s))
        phases = (*on_device, ("parking", PARK_S), ("publishing", PUBLISH_S))
        for phase, duration_s in phases:
            if passed_s < duration_s:
                held = run.state_bytes if phase == "publishing" else 0
                told = 0 if phase == "restoring" else replays
                return WorkerState(phase=phase, iteration=iteration, bytes_held=held, replays=told)
            passed_s -= duration_s
        self.store_of(run).put(layout.manifest(layout.weights(iteration + 1)), b"m")
        return WorkerState(phase="parked", iteration=iteration, bytes_held=run.state_bytes)

    def evict(self, run_id):
        assert not self.state(run_id).has_device
        self.evicted.append(run_id)
        self.evicted_at_s.setdefault(run_id, self.clock.monotonic() - 500.0)
        self.at.pop(run_id, None)
        self.reads.pop(run_id, None)

    def kill(self, run_id):
        self.killed.append(run_id)
        self.hang.discard(run_id)
        self.at.pop(run_id, None)
        self.failed[run_id] = ("killed", None)


class Stage:
    """A fleet with one production host, and what its runs do at which second."""

    def __init__(self, true):
        self.clock, self.true = EventfulClock(), true
        self.fleet = NestedStore(self.true, "fleet")
        self.refused = {}
        self.workers = ScriptedWorkers(self.clock, self.store_of)
        self.told = False

    def store_of(self, run):
        return NestedStore(self.true, run.run_url[-1])

    def open(self, url):
        if url[-1] in self.refused:
            raise self.refused[url[-1]]
        return NestedStore(self.true, url[-1])

    def admit(self, *runs, exist=True):
        for run in runs:
            records.put(self.fleet, fleet_layout.admitted(run.id), run)
            if exist:
                records.put(self.store_of(run), layout.RUN, RUN)

    def due(self, run, iteration, at_s=0.0):
        record = DueRecord(iteration=iteration, groups=1)
        self.clock.at(at_s, lambda: records.put(self.store_of(run), layout.due(iteration), record))

    def plan(self, run, iteration, at_s=0.0):
        self.clock.at(at_s, lambda: self.store_of(run).put(layout.plan(iteration), b"planned"))

    def play(self, until_s, memory_bytes=100, fleet=None, member=None, unfinished=None, **settings):
        def tell():
            self.told = True

        self.clock.at(until_s, tell)
        host = Host(
            fleet or self.fleet,
            FLEET,
            a_host("me", memory_bytes),
            HostSettings(poll_interval_s=1.0, look_interval_s=5.0, **settings),
            self.workers,
            self.clock,
            member=member,
            open_store=self.open,
            unfinished=unfinished or (lambda *_: 0.0),
            is_told_to_end=lambda: self.told,
        )
        host.run()
        return self.begun

    @property
    def begun(self):
        return [(run, iteration) for run, iteration, _ in self.workers.begun]

    @property
    def spent(self):
        return [records.read(self.fleet, SpentRecord, key) for key in self.fleet.list(fleet_layout.spent_by("me"))]

    @property
    def beat(self):
        return records.read(self.fleet, HostBeat, fleet_layout.alive("me"))
