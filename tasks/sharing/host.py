"""A host: a process on a reserved machine that lets the phases of all seated runs train in turns.

The host beats, looks at the fleet, takes seats, looks which phases are due, and drives the workers. The host trains
nothing, reads no journal, and waits for no second host. An expected error of a store or a run is logged once and stops
no other run. Every decision follows the monotonic clock of the host.
"""

import logging
from collections.abc import Callable
from typing import Literal

from storage.clock import Clock
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import AdmittedRun, FleetRecord, HostBeat, HostRecord
from storage.records import records
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from tasks.sharing.backfill import Backfill, unfinished_tokens
from tasks.sharing.host_settings import HostSettings
from tasks.sharing.phase_order import DueRun, next_run
from tasks.sharing.phase_poller import OpenStore, PhasePoller, ServedRun
from tasks.sharing.residents import expected_s
from tasks.sharing.seating import Seating
from tasks.sharing.spending import KINDS, Spending
from tasks.sharing.state_cache import Need, StateCache
from tasks.sharing.tolerated_errors import ToleratedErrors
from tasks.sharing.workers import BackfillMember, PhaseWorkers, WorkerState

log = logging.getLogger(__name__)
BEATS_PER_TTL = 6
# After a failed phase the run is left alone for a poll interval, then twice that, and so on up to this.
PAUSE_S_MAX = 120.0
SECONDS_PER_HOUR = 3600.0


class Host:
    """One incarnation of a host."""

    def __init__(
        self,
        store: ObjectStore,
        fleet: FleetRecord,
        me: HostRecord,
        settings: HostSettings,
        workers: PhaseWorkers,
        clock: Clock,
        *,
        member: BackfillMember | None = None,
        open_store: OpenStore = connect,
        unfinished: Callable[[ObjectStore, int], float] = unfinished_tokens,
        is_told_to_end: Callable[[], bool] = lambda: False,
    ) -> None:
        """A host that has not begun.

        Args:
            store: The store of the fleet.
            fleet: The rules of the fleet.
            me: The record of this host.
            settings: Intervals and limits of this host.
            workers: The workers of the seated runs.
            clock: Monotonic time, and sleep.
            member: Generates responses while the device is idle, if `settings.backfill_s` is set.
            open_store: Connects to the store of a run.
            unfinished: Counts the tokens that an iteration in a run's store still needs.
            is_told_to_end: True if the host should end at the next phase boundary.
        """
        self._store = store
        self._fleet = fleet
        self._me = me
        self._settings = settings
        self._workers = workers
        self._clock = clock
        self._open_store = open_store
        self._is_told_to_end = is_told_to_end
        self._began_s = clock.monotonic()
        self._errors = ToleratedErrors()
        self._seating = Seating(store, fleet, me, clock)
        self._spending = Spending(me.incarnation)
        self._unfinished = unfinished
        self._backfill = Backfill(member, settings.backfill_s, settings.notice_s)
        self._state_cache = StateCache(workers, me, self._spending.note_restored)
        self._served: dict[str, ServedRun] = {}
        self._trains: tuple[str, int] | None = None
        self._announced = False
        self._leaving = False
        self._beats = 0
        self._next_beat_s = self._next_look_s = 0.0
        self._next_record_s = settings.spent_interval_s

    def run(self) -> None:
        """Serve the fleet until the host is told to end, or `settings.hours` are over, and no phase is under way."""
        log.info("host %s serves the fleet %s", self._me.incarnation, self._store.url)
        while not self._step():
            self._clock.sleep(self._settings.poll_interval_s)
        self._end()

    def _now_s(self) -> float:
        """Seconds since the host began."""
        return self._clock.monotonic() - self._began_s

    def _step(self) -> bool:
        """Do the work that is due now; returns whether the host may end."""
        self._attend_device()
        self._attend_backfill()
        self._attend_others()
        self._state_cache.note_restored(self._served)
        self._drop_unseated()
        self._beat_if_due()
        self._record_if_due()
        lived_hours = self._now_s() / SECONDS_PER_HOUR
        if self._is_told_to_end() or (self._settings.hours is not None and lived_hours >= self._settings.hours):
            self._leaving = True
        if self._leaving:
            self._backfill.leave(self._now_s())
            return self._backfill.run is None and not any(self._workers.state(run).is_busy for run in self._served)
        if self._now_s() >= self._next_look_s:
            with self._errors.tolerated("looking at the fleet"):
                self._look()
        self._look_for_due()
        if self._trains is None:
            self._use_device()
        self._prefetch()
        return False

    def _end(self) -> None:
        """Drop all states, write the last records of spent time, and write the heartbeat "gone"."""
        for run in self._served:
            self._state_cache.drop(run)
        ended_s = self._now_s()
        self._spending.record(self._seating.seated, ended_s)
        while not self._spending.is_written and self._now_s() < ended_s + self._fleet.host_ttl_s:
            with self._errors.tolerated("writing what was spent"):
                self._spending.write(self._store)
            if not self._spending.is_written:
                self._clock.sleep(self._settings.poll_interval_s)
        self._beat("gone", ended_s)
        log.info("host %s ends after %.0f s", self._me.incarnation, ended_s)

    # The fleet.

    def _beat_if_due(self) -> None:
        now_s = self._now_s()
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._fleet.host_ttl_s / BEATS_PER_TTL
            self._beat("leaving" if self._leaving else "idle" if self._trains is None else "training", now_s)

    def _beat(self, state: Literal["idle", "training", "leaving", "gone"], now_s: float) -> None:
        run, iteration = self._trains or (None, None)
        beat = HostBeat(
            incarnation=self._me.incarnation,
            sequence=self._beats,
            resident=run,
            iteration=iteration,
            lived_s=now_s,
            state=state,
        )
        self._beats += 1
        with self._errors.tolerated("writing the heartbeat"):
            records.put(self._store, fleet_layout.alive(self._me.incarnation), beat)

    def _record_if_due(self) -> None:
        if self._now_s() >= self._next_record_s:
            self._record()

    def _record(self) -> None:
        """Record the time spent until now, for the runs that are seated now."""
        self._next_record_s = self._now_s() + self._settings.spent_interval_s
        self._spending.record(self._seating.seated, self._now_s())
        with self._errors.tolerated("writing what was spent"):
            self._spending.write(self._store)

    def _look(self) -> None:
        """Look at runs, seats and hosts of the fleet, and take the free seats that placement gives this host."""
        self._next_look_s = self._now_s() + self._settings.look_interval_s
        before = self._seating.seated
        try:
            if not self._announced:
                records.commit(self._store, fleet_layout.host(self._me.incarnation), self._me)
                self._announced = True
            self._seating.look()
        finally:
            seated = self._seating.seated
            if seated.keys() != before.keys():
                self._spending.record(before, self._now_s())
            for run in seated.values():
                if run.id not in self._served:
                    log.info("run %s (%s) is seated here", run.id, run.run_url)
                    self._served[run.id] = ServedRun(run, PhasePoller(run, self._open_store))
        for name in self._seating.seated:
            if not self._workers.state(name).bytes_held:
                with self._errors.tolerated(f"the plans of run {self._served[name].run.run_url}"):
                    self._served[name].poller.look_for_plan()

    def _drop_unseated(self) -> None:
        """End the workers of runs that are no longer seated here, a worker with a phase after the end of the phase."""
        for run in [run for run in self._served if run not in self._seating.seated]:
            if not self._is_under_way(run):
                log.info("run %s is no longer seated here", run)
                self._state_cache.drop(run)
                del self._served[run]

    def _is_under_way(self, run: str) -> bool:
        """Whether a phase of the run has the device, or is published."""
        trains = self._trains is not None and self._trains[0] == run
        return trains or self._served[run].publishes_since_s is not None

    # The runs.

    def _look_for_due(self) -> None:
        """Look at every seated run without a known due phase and without a phase under way."""
        for run in self._seating.seated:
            served = self._served[run]
            if served.due is None and not self._is_under_way(run) and self._now_s() >= served.paused_until_s:
                self._beat_if_due()
                iteration = self._due_of(served)
                if iteration is not None:
                    served.due = (iteration, self._now_s())

    def _due_of(self, served: ServedRun) -> int | None:
        """The iteration whose phase is due, or None. A run that cannot be read is left alone for a while."""
        iteration = None
        with self._errors.tolerated(f"run {served.run.run_url}") as attempt:
            iteration = served.poller.due()
        if attempt.failed:
            self._put_off(served)
        elif iteration is None:
            served.pause_s = 0.0
        return iteration

    def _put_off(self, served: ServedRun) -> None:
        served.due = None
        served.pause_s = min(PAUSE_S_MAX, max(self._settings.poll_interval_s, 2 * served.pause_s))
        served.paused_until_s = self._now_s() + served.pause_s

    # The device.

    def _use_device(self) -> None:
        """If a phase is due, begin the phase as soon as no member has the device; else let a member generate."""
        if any(self._served[run].due is not None for run in self._seating.seated):
            self._backfill.leave(self._now_s())
            if self._backfill.run is None:
                self._begin_next()
            return
        needs = [each for each in self._needs() if each.run.id in self._seating.seated]
        if self._backfill.may_begin(needs, self._now_s()):
            found = {}
            for each in needs:
                with self._errors.tolerated(f"what is unfinished of run {each.run.run_url}"):
                    found[each.run.id] = self._served[each.run.id].poller.unfinished(self._unfinished)
            self._backfill.begin(needs, found, self._now_s())
            if self._backfill.run is not None:
                self._spending.note("backfill", self._backfill.run, None, self._now_s())

    def _attend_backfill(self) -> None:
        run = self._backfill.run
        if run is None:
            return
        if run not in self._seating.seated:
            self._backfill.leave(self._now_s())
        self._backfill.attend(self._now_s())
        if self._backfill.run is None:
            self._spending.note("idle", None, None, self._now_s())

    def _begin_next(self) -> None:
        """Begin the next phase in order that is still due, and whose seat this host still has.

        A run whose state is being read into host memory is passed over until the read ends.
        """
        waiting = {
            run: self._served[run]
            for run in self._seating.seated
            if self._served[run].due is not None and self._served[run].prefetches_since_s is None
        }
        while chosen := next_run([self._due_run(served) for served in waiting.values()]):
            served = waiting.pop(chosen.id)
            iteration = self._due_of(served)
            if iteration is None or served.due is None:
                served.due = None
            elif iteration != served.due[0]:
                served.due = (iteration, self._now_s())
            elif self._is_still_mine(served.run):
                self._begin(served, iteration)
                return

    def _due_run(self, served: ServedRun) -> DueRun:
        assert served.due is not None, f"run {served.run.id} is not due"
        return DueRun(
            id=served.run.id,
            waited_s=self._now_s() - served.due[1],
            expected_s=served.run.phase_s,
            wait_s_max=served.run.wait_s_max(self._fleet.slowdown_max),
            share=served.run.share,
        )

    def _is_still_mine(self, run: AdmittedRun) -> bool:
        """Whether this host still has the seat; False if the seat cannot be read.

        A host that was frozen saves a phase by this look. Correctness does not depend on the look.
        """
        is_mine = False
        with self._errors.tolerated(f"the seat of {run.run_url}") as attempt:
            is_mine = self._seating.is_mine(run.id)
        if not is_mine and not attempt.failed:
            log.info("the seat of run %s was taken over", run.id)
            self._next_look_s = 0.0
        return is_mine

    def _begin(self, served: ServedRun, iteration: int) -> None:
        run, needs = served.run, self._needs()
        served.due, served.begun_s, self._trains = None, self._now_s(), (run.id, iteration)
        self._spending.note("switch", run.id, iteration, served.begun_s)
        with self._errors.tolerated(f"the worker of {run.run_url}"):
            self._state_cache.begin(run, iteration, needs)

    def _needs(self) -> list[Need]:
        """When the state of each served run is expected to be needed next; for a due run, the time of falling due."""
        now_s = self._now_s()
        return [
            Need(run, served.due[1] if served.due is not None else expected_s(served.begun_s, run.cycle_s, now_s))
            for served in self._served.values()
            for run in (served.run,)
        ]

    def _prefetch(self) -> None:
        """Let the next needed state be read into host memory, whether the device is idle or trains a second run."""
        ready = {}
        for name in self._seating.seated:
            served = self._served[name]
            iteration = served.due[0] if served.due is not None else served.poller.planned
            if iteration is not None and not self._is_under_way(name) and self._now_s() >= served.paused_until_s:
                ready[name] = iteration
        with self._errors.tolerated("reading a state ahead"):
            self._state_cache.prefetch(self._needs(), ready)
        for name, served in self._served.items():
            if served.prefetches_since_s is None and self._workers.state(name).phase == "prefetching":
                served.prefetches_since_s = self._now_s()

    def _attend_device(self) -> None:
        """Look at the worker on the device, and note the phase of the worker."""
        if self._trains is None:
            return
        run, iteration = self._trains
        served, state, now_s = self._served[run], self._workers.state(run), self._now_s()
        if state.has_device:
            self._spending.note(KINDS[state.phase], run, iteration, now_s)
            self._end_overtime(served, served.begun_s, "trains", phases=1 + state.replays)
            return
        self._spending.note("idle", None, None, now_s)
        self._trains = None
        served.publishes_since_s = now_s
        self._attend_publication(served, state)

    def _attend_others(self) -> None:
        """Poll the workers that do not hold the device."""
        for run, served in self._served.items():
            state = self._workers.state(run)
            self._attend_publication(served, state)
            self._attend_prefetch(served, state)

    def _attend_prefetch(self, served: ServedRun, state: WorkerState) -> None:
        if served.prefetches_since_s is None:
            return
        if state.phase == "prefetching":
            self._end_overtime(served, served.prefetches_since_s, "reads its state ahead")
            return
        served.prefetches_since_s = None
        if state.phase == "failed":
            log.warning("run %s: its state could not be read ahead: %s", served.run.run_url, state.message)

    def _attend_publication(self, served: ServedRun, state: WorkerState) -> None:
        """Look whether a phase that has left the device is published."""
        if served.publishes_since_s is None:
            return
        if state.phase == "publishing":
            self._end_overtime(served, served.publishes_since_s, "publishes")
            return
        served.publishes_since_s = None
        if state.phase == "parked":
            served.pause_s = 0.0
        else:
            log.error("run %s: its worker is %s: %s", served.run.run_url, state.phase, state.message)
            if state.lasting and state.iteration is not None:
                # The run's own train task is to end with this message.
                with self._errors.tolerated(f"the failure of {served.run.run_url}"):
                    served.poller.fail(state.iteration, state.message)
            self._put_off(served)

    def _end_overtime(self, served: ServedRun, since_s: float, does: str, phases: int = 1) -> None:
        """Kill a worker that exceeds `settings.limit_s` per phase; the phase is due again, and is repeated cold."""
        lasts_s = self._now_s() - since_s
        if lasts_s > phases * self._settings.limit_s(served.run):
            log.error("run %s %s for %.0f s; its worker is killed", served.run.run_url, does, lasts_s)
            self._workers.kill(served.run.id)
