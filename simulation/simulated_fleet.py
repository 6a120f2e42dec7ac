"""A simulated fleet: production's hosts, simulated workers and runs, and an operator, on one timeline and one store.

Each machine has one incarnation of a host after the other. A run is a process that plays rollouts of drawn length, says
that its phase is due, waits for the next weights, and commits; it meets faults of the store, but does not die.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from simulation.ledger_of_fleet import HostLife, LedgerOfFleet, run_folder
from simulation.simulated_backfill import SimulatedBackfill
from simulation.simulated_fleet_history import DrawnHost, DrawnRun, FleetHistory, FleetStrike
from simulation.simulated_lines import Lines, started
from simulation.simulated_session import Machine
from simulation.simulated_weather import in_outage, in_refusal
from simulation.simulated_workers import SimulatedWorkers, patient
from simulation.virtual_time import Process, Timeline
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import AdmittedRun, DueRecord, FleetRecord, HostRecord, LeftRecord
from storage.records import layout, records
from storage.records.records import RunRecord
from storage.records.run import exists
from storage.stores.faults import Crashed, FaultRates, FaultyStore
from storage.stores.memory import NestedStore
from storage.stores.store import ObjectStore, StoreDenied, StoreUnavailable
from storage.weights.manifest import Manifest
from tasks.sharing.host import Host
from tasks.sharing.host_settings import HostSettings

TURNS_MAX = 400_000
ROOT = "memory://simulated"
HOUR_S = 3600.0
RUN_POLL_S, RUN_BACK_S = 4.0, 5.0


class SimulatedFleet:
    """One history of a fleet."""

    def __init__(self, history: FleetHistory) -> None:
        self.history = history
        self._timeline = Timeline(random.Random(f"turns {history.seed}"), history.limit_s, TURNS_MAX)
        self._rng = random.Random(f"strikes {history.seed}")
        self.ledger = LedgerOfFleet(lambda: self._timeline.now_s, history.host_ttl_s)
        self._lines = Lines(history, self._timeline, self.ledger)
        self._fleet = FleetRecord(run_prefixes=(ROOT,), host_ttl_s=history.host_ttl_s, created_at_s=0.0)
        self._hosts: dict[int, tuple[Machine, SimulatedWorkers]] = {}
        self._runs: dict[int, Machine] = {}
        self._lives = 0
        self._told: set[str] = set()
        self._gates: dict[int, list[FaultyStore]] = {}
        self._away: dict[int, FaultRates] = {}
        self.unfinished = set(range(len(history.runs)))
        self.left: set[int] = set()

    def run(self) -> LedgerOfFleet:
        """Run until no event is left."""
        for number, run in enumerate(self.history.runs):
            self.ledger.runs[fleet_layout.run_id(self._url(number))] = run_folder(number)
            self._start_run(number, run)
            if run.leaves_at_s is not None:
                self._timeline.at(run.leaves_at_s, partial(self._leave, number))
        for slot, host in enumerate(self.history.hosts):
            self._timeline.at(host.arrives_at_s, partial(self._start_host, slot, host))
        for strike in self.history.strikes:
            self._timeline.at(strike.at_s, partial(self._strike, strike))
        self._timeline.at(self.history.calm_at_s, lambda: self._lines.change(self.history.calm, "calm"))
        self._start("operator", self._operate, calm=True)
        if not self._timeline.run():
            self.ledger.breaks(f"livelock: no end by {self._timeline.now_s:.0f} s and {self._timeline.turns} turns")
        self.ledger.counts.update(self._lines.faults())
        return self.ledger

    def _url(self, number: int) -> str:
        return f"{ROOT}/{run_folder(number)}"

    def _start(
        self,
        name: str,
        main: Callable[[Machine, ObjectStore], None],
        ended: Callable[[Machine, BaseException | None], None] | None = None,
        *,
        calm: bool = False,
    ) -> Machine:
        """Start a process; `main` gets the process and a connection to the true store."""

        def on_end(process: Machine, error: BaseException | None) -> None:
            self.ledger.tell(name, f"ends: {'done' if error is None else repr(error)}")
            if error is not None and not isinstance(error, Crashed):
                self.ledger.breaks(f"error: {name} ended with {error!r}")
            if ended is not None:
                ended(process, error)

        def body(process: Machine) -> None:
            connect = self._lines.connect_calmly if calm else self._lines.connect
            main(process, connect(process, name))

        return started(self._timeline, self.ledger, self.history.seed, name, body, on_end)

    # Runs, and their operator.

    def _operate(self, process: Machine, store: ObjectStore) -> None:
        """Create the fleet, admit the runs, and let those leave that are to."""
        fleet = NestedStore(store, "fleet")
        records.commit(fleet, fleet_layout.FLEET, self._fleet)
        todo: list[tuple[float, str, records.AnyRecord]] = []
        for number, drawn in enumerate(self.history.runs):
            url = self._url(number)
            run = AdmittedRun(
                id=fleet_layout.run_id(url),
                run_url=url,
                phase_s=drawn.phase_s,
                cycle_s=drawn.phase_s + drawn.rollout_s,
                state_bytes=drawn.state_bytes,
                admitted_at_s=process.clock.wall(),
                share=drawn.share,
            )
            todo.append((drawn.admitted_at_s, fleet_layout.admitted(run.id), run))
            if drawn.leaves_at_s is not None:
                left = LeftRecord(id=run.id, reason="drawn", left_at_s=process.clock.wall())
                todo.append((drawn.leaves_at_s, fleet_layout.left(run.id), left))
        for at_s, key, record in sorted(todo, key=lambda each: each[0]):
            process.sleep(max(0.0, at_s - self._timeline.now_s))
            records.commit(fleet, key, record)

    def _start_run(self, number: int, run: DrawnRun) -> None:
        if number not in self.unfinished:
            return

        def ended(_: Machine, error: BaseException | None) -> None:
            if error is not None:
                self._timeline.after(RUN_BACK_S, partial(self._start_run, number, run))

        self._runs[number] = self._start(run_folder(number), partial(self._play, number, run), ended)

    def _leave(self, number: int) -> None:
        if number in self.unfinished:
            self.left.add(number)
            self.unfinished.discard(number)
            self._runs[number].kill()

    def _play(self, number: int, run: DrawnRun, process: Machine, store: ObjectStore) -> None:
        """The life of a run, without its members and its training. Started again, it goes on where it was."""
        rng = random.Random(f"run {number} {self.history.seed}")
        store, clock = NestedStore(store, run_folder(number)), process.clock
        process.sleep(max(0.0, run.exists_at_s - self._timeline.now_s))
        first = Manifest(tensors={}, objects={}, metadata={"version": 0})
        config = RunRecord(config={}, digest="0" * 32, vocab_size=1, model_files={}, created_at_s=clock.wall())
        for folder in (layout.checkpoint(0), layout.weights(0)):
            if not _at_last(process, partial(exists, store, layout.report(0))):
                _at_last(process, partial(records.commit, store, layout.manifest(folder), first))
        _at_last(process, partial(records.commit, store, layout.RUN, config))
        sweeps = rng.random() < 0.5
        for n in range(run.iterations):
            rollout_s = run.rollout_s * rng.uniform(0.5, 1.5)
            _at_last(process, partial(store.create, layout.plan(n), b"planned"))
            if not _at_last(process, partial(exists, store, layout.due(n))):
                clock.sleep(rollout_s)
                _at_last(process, partial(records.commit, store, layout.due(n), DueRecord(iteration=n, groups=1)))
            published = layout.manifest(layout.weights(n + 1))
            while not _at_last(process, partial(_exists_any, store, published, layout.report(n))):
                clock.sleep(RUN_POLL_S)
            _at_last(process, partial(store.create, layout.report(n), b"committed"))
            if sweeps:
                _at_last(process, partial(store.delete, layout.manifest(layout.weights(n))))
                # Without the next one, a replay begins from it.
                if _at_last(process, partial(exists, store, layout.manifest(layout.checkpoint(n + 1)))):
                    _at_last(process, partial(store.delete, layout.manifest(layout.checkpoint(n))))
        self.unfinished.discard(number)

    # Hosts.

    def _start_host(self, slot: int, drawn: DrawnHost) -> None:
        if not self.unfinished:
            return
        self._lives += 1
        name = f"host{slot}-{self._lives}"

        def main(process: Machine, store: ObjectStore) -> None:
            life.clock_began_s = process.clock.monotonic()
            stores = partial(self._run_store, process, store)
            workers = SimulatedWorkers(self.history, self._timeline, self.ledger, process, stores, drawn.memory_bytes)
            rng = random.Random(f"member {name} {self.history.seed}")
            urls = {self._url(number): run for number, run in enumerate(self.ledger.runs)}
            self._hosts[slot] = process, workers

            def is_told_to_end() -> bool:
                is_told = not self.unfinished or name in self._told
                if is_told:
                    life.told_to_end_s = min(life.told_to_end_s, life.lived_s())
                return is_told

            me = HostRecord(
                incarnation=name,
                machine=f"machine{slot}",
                memory_bytes=drawn.memory_bytes,
                usd_per_hour=None,
                began_at_s=process.clock.wall(),
            )
            host = Host(
                NestedStore(store, "fleet"),
                self._fleet,
                me,
                self._settings(drawn),
                workers,
                process.clock,
                member=SimulatedBackfill(self._timeline, self.ledger, name, rng, urls),
                open_store=lambda url: stores(url, ""),
                unfinished=lambda run, iteration: float(exists(run, layout.plan(iteration))),
                is_told_to_end=is_told_to_end,
            )
            host.run()
            life.clock_ended_s = process.clock.monotonic()

        def ended(process: Machine, error: BaseException | None) -> None:
            life.ended_s, life.device = self._timeline.now_s, None
            if error is not None:
                self.ledger.note_fault(f"host: {type(error).__name__}", max(1, len(life.under_way)))
            for thread in process.threads:
                self._timeline.after(0.0, thread.kill)
            self._timeline.after(drawn.back_s, partial(self._start_host, slot, drawn))

        clock = self._start(name, main, ended).clock
        life = self.ledger.hosts[name] = HostLife(self._timeline.now_s, clock.monotonic(), clock, drawn.stays_s)

    def _settings(self, drawn: DrawnHost) -> HostSettings:
        return HostSettings(
            poll_interval_s=self.history.poll_interval_s,
            look_interval_s=self.history.look_interval_s,
            spent_interval_s=60.0,
            hours=None if drawn.stays_s is None else drawn.stays_s / HOUR_S,
            overtime_s_min=self.history.overtime_s_min,
            backfill_s=drawn.backfill_s,
        )

    def _run_store(self, process: Machine, of_host: ObjectStore, url: str, name: str) -> ObjectStore:
        """A run's store for a host, or for its worker of this name; it cannot be reached while the run cannot."""
        number = int(url.removeprefix(f"{ROOT}/run"))
        below = self._lines.connect(process, name) if name else of_host
        rates = self._away.get(number, FaultRates())
        gate = FaultyStore(NestedStore(below, run_folder(number)), rates, random.Random(name), process.clock)
        self._gates.setdefault(number, []).append(gate)
        return gate

    # Faults.

    def _strike(self, strike: FleetStrike) -> None:
        living = [each for _, each in sorted(self._hosts.items()) if not each[0].dead]
        self.ledger.counts[f"strike: {strike.kind}"] += 1
        if strike.kind == "outage":
            self._lines.disturb(in_outage(self.history.weather), "outage", strike.duration_s)
        elif strike.kind == "denied":
            self._lines.disturb(in_refusal(self.history.weather, denied=True), "denied", strike.duration_s)
        elif strike.kind == "run away":
            number = self._rng.randrange(len(self.history.runs))
            lost = self._rng.random() < 0.5
            away = in_outage(self.history.weather) if lost else FaultRates(denied=1.0)
            self._reach(number, replace(away, latency_s=0.0))
            self._timeline.after(strike.duration_s, partial(self._reach, number, FaultRates()))
        elif living:
            self._strike_host(*self._rng.choice(living), strike)

    def _reach(self, number: int, rates: FaultRates) -> None:
        """Let hosts and workers reach a run with these faults from now on."""
        away = "is denied" if rates.denied else "does not answer" if rates.request_lost else "is there again"
        self.ledger.tell("weather", f"{run_folder(number)} {away}")
        self._away[number] = rates
        for gate in self._gates.get(number, ()):
            gate.rates = rates

    def _strike_host(self, process: Machine, workers: SimulatedWorkers, strike: FleetStrike) -> None:
        self.ledger.tell(process.name, f"suffers {strike.kind}, {strike.duration_s:.1f} s")
        if strike.kind == "kill":
            process.kill()
        elif strike.kind == "worker":
            workers.strike(self._rng)
        elif strike.kind == "told":
            self._told.add(process.name)
        elif strike.kind == "clock":
            offset_s = self._rng.choice((-24, -1, 1, 24)) * HOUR_S
            process.clock.jump(offset_s)
            self._timeline.after(strike.duration_s, lambda: process.clock.jump(-offset_s))
        elif strike.kind == "heartbeat":
            key = f"fleet/{fleet_layout.alive(process.name)}"
            self.ledger.view("stranger").put(key, self._rng.randbytes(self._rng.randint(1, 200)))
        elif strike.kind == "freeze" and self._rng.random() < 0.5:
            Process.freeze(process, strike.duration_s)  # its workers go on
        else:
            process.freeze(strike.duration_s)
            if strike.kind == "suspend":
                process.clock.stop(strike.duration_s)


def _exists_any(store: ObjectStore, *keys: str) -> bool:
    return any(exists(store, key) for key in keys)


def _at_last(process: Machine, request: Callable[[], object]) -> object:
    """The result of a request that is repeated until the store answers."""
    while True:
        try:
            return patient(process.clock, request)
        except (StoreUnavailable, StoreDenied):
            process.clock.sleep(RUN_POLL_S)
