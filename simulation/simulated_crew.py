"""A simulated crew: production members and a trainer run through a history, on virtual time and a faulty store.

Session, claims, journal, rebalancing and the trainer's following are production code; only engine, clock and store are
deterministic replacements. This module plays Flyte: it starts lost members again, with another name and a cold start.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from simulation.ledger import Ledger, WatchedStore
from simulation.simulated_absence import Outage, Pods
from simulation.simulated_history import LASTING, History, Strike
from simulation.simulated_member import EXECUTION, Members
from simulation.simulated_session import Machine
from simulation.simulated_trainer import SimulatedTrainer, observe
from simulation.undisturbed import Whole, undisturbed
from simulation.virtual_time import ProcessClock, Timeline
from storage import layout
from storage.assembly import JournalReader
from storage.crew_records import note_rollout_ended
from storage.faults import Crashed, CrashingStore, FaultRates, FaultyStore
from storage.records import TRAIN_POOL
from storage.store import CorruptObject, ObjectStore, StoreUnavailable
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.session.session_outcome import Preempted

TRAINER, OBSERVER, FLYTE = "trainer", "observer", "flyte"
RELAUNCH_AFTER_S = 300.0
TURNS_MAX = 50_000
WAITS_MAX = 3
EXPECTED = (Preempted, StoreUnavailable, EngineDied)
MOMENTS: tuple[Literal["before", "after", "later"], ...] = ("before", "after", "later")


@dataclass
class Outcome:
    """The course of a history: the true store, the counts of events, and the time of the end.

    requests_to_bound: the most requests of any member, as a share of the bound (simulation/judge.py).
    promise_to_bound: the longest time that a token was in one process only, as a share of the bound
        (simulation/judge_promises.py).
    wait_to_bound: the longest time without new tokens, as a share of the bound (simulation/judge_absence.py).
    """

    ledger: Ledger
    truth: Mapping[int, Whole]
    counts: Counter[str]
    ended_at_s: float
    requests_to_bound: float = 0.0
    promise_to_bound: float = 0.0
    wait_to_bound: float = 0.0

    @property
    def broken(self) -> list[str]:
        """All broken rules, each with its kind before the colon."""
        return self.ledger.broken


class LineClock:
    """The clock of a connection to the store: a process's clock that notes every wait longer than `usual_s`."""

    def __init__(self, clock: ProcessClock, ledger: Ledger, usual_s: float) -> None:
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


class SimulatedCrew:
    """Members, the trainer and an observer of one history."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._rng = random.Random(f"turns {history.seed}")
        self._truth = undisturbed(history)
        self._timeline = Timeline(self._rng, self.limit_s, TURNS_MAX)
        self._ledger = Ledger(lambda: self._timeline.now_s)
        self._weather = history.weather
        self._stores: dict[str, FaultyStore] = {}
        self._crashing: dict[str, CrashingStore] = {}
        self._crashes_left = history.crashes
        self._members: dict[int, Machine] = {}
        # The names under which each process reaches the store: its own, and those of members in it.
        self._names: dict[str, list[str]] = defaultdict(list)
        self._noticed: set[str] = set()
        self._starts_pending = 0
        self._trainer: Machine | None = None
        self._trainers = 0
        self._counts: Counter[str] = Counter()
        self._pods = Pods(history.absence, [place.slot for place in history.plan.slots if place.pool != TRAIN_POOL])
        self._is_map_noted = self._are_latecomers_due = False
        self._lives = Members(history, self._ledger, self._counts, lambda: self._timeline.now_s, self._behind_faults)

    def run(self) -> Outcome:
        """Run the history until no event is left, zombies included."""
        for member, arrival_s in enumerate(self._history.arrivals_s):
            if self._pods.comes(member):
                self._schedule_member(member, arrival_s)
        for outage in self._history.absence.outages if self._history.absence else ():
            self._timeline.at(outage.at_s, partial(self._black_out, outage))
        for strike in self._history.strikes:
            self._schedule_strike(strike)
        self._timeline.at(self._history.calm_at_s, lambda: self._change_weather(self._history.calm, "calm"))
        self._start_trainer()
        self._start(OBSERVER, self._observe, self._ended)
        if not self._timeline.run():
            self._ledger.breaks(f"livelock: no end by {self._timeline.now_s:.0f} s and {self._timeline.turns} turns")
        for store in self._stores.values():
            self._counts.update({f"fault: {fault.value}": count for fault, count in store.struck.items()})
        return Outcome(self._ledger, self._truth, self._counts, self._timeline.now_s)

    @property
    def limit_s(self) -> float:
        """The time by which even the slowest machine alone would have decoded everything after the last fault."""
        history = self._history
        tokens = sum(len(whole.token_ids) for whole in self._truth.values())
        standing_s = sum(strike.duration_s for strike in history.strikes) + 10 * history.weather.pause_s[1]
        waiting_s = 2 * RELAUNCH_AFTER_S + 20 * history.claim_ttl_s
        if history.absence is not None:
            # Full batches, and at the end the longest response alone.
            steps = 2 * tokens / history.in_flight + max(len(whole.token_ids) for whole in self._truth.values())
            return history.last_fault_s + WAITS_MAX * history.wait_s_max + steps * history.slowest_step_s
        return history.calm_at_s + standing_s + waiting_s + 2 * tokens * history.slowest_step_s

    # Members and what Flyte does with them.

    def _schedule_member(self, member: int, delay_s: float) -> None:
        self._starts_pending += 1
        self._timeline.after(delay_s, lambda: self._start_member(member))

    def _start_member(self, member: int) -> None:
        self._starts_pending -= 1
        delay_s = 0.0 if self._is_trainers(member) else self._pods.delay_s(self._timeline.now_s)
        # In histories with absences, members also start after the end: they must then do nothing.
        if math.isinf(delay_s) or (self._ledger.is_closed and self._history.absence is None):
            return
        if delay_s:
            self._schedule_member(member, delay_s + self._rng.uniform(*self._history.cold_start_s))
            return
        lasts_s = self._pods.start(member)
        self._counts["joins" if self._joins(member) else "starts"] += 1
        name = f"{member:05d}-{self._rng.getrandbits(64):016x}"
        process = self._members[member] = self._start(
            name,
            lambda process: self._lives.live(process, member, lambda: process.name in self._noticed),
            lambda process, error: self._lost(process, member, error),
        )
        if lasts_s is not None:
            self._timeline.after(lasts_s, process.kill)

    def _joins(self, member: int) -> bool:
        return member >= len(self._history.plan.slots)

    def _is_trainers(self, member: int) -> bool:
        return self._history.pool(member) == TRAIN_POOL

    def _lost(self, process: Machine, member: int, error: BaseException | None) -> None:
        self._ended(process, error)
        if error is not None and self._comes_again(member, error):
            self._schedule_member(member, self._rng.uniform(*self._history.cold_start_s))
            return
        self._pods.ended(member)
        self._note_end_of_map()
        self._timeline.after(RELAUNCH_AFTER_S, self._relaunch)

    def _comes_again(self, member: int, error: BaseException) -> bool:
        """Whether a member is started again; the trainer's is not after its engine died or training has begun."""
        if self._is_trainers(member):
            return not isinstance(error, EngineDied) and layout.batch(0, 0) not in self._ledger.created
        if self._joins(member):
            return self._rng.random() < 0.3
        return self._pods.starts_again(member)

    def _black_out(self, outage: Outage) -> None:
        """Kill all members but the trainer's at once; none starts for a while, or ever again."""
        self._counts["crew outages for ever" if math.isinf(outage.duration_s) else "crew outages"] += 1
        self._ledger.note_fault()
        self._ledger.tell(FLYTE, f"has no machines, {outage.duration_s:.1f} s")
        self._pods.none_until(self._timeline.now_s + outage.duration_s)
        for member, process in sorted(self._members.items()):
            if not self._is_trainers(member):
                process.kill()
        self._note_end_of_map()

    def _note_end_of_map(self) -> None:
        """Write what the task behind a rollout map writes, some time after the map's last slot has ended."""
        if self._history.absence is None or self._is_map_noted or not self._pods.all_ended:
            return
        self._is_map_noted = True
        self._counts["rollout maps noted as ended"] += 1
        slots = [place.slot for place in self._history.plan.slots if not self._is_trainers(place.slot)]
        self._timeline.after(
            self._rng.uniform(1, 30),
            lambda: note_rollout_ended(self._ledger.view(FLYTE), 0, EXECUTION, "rollout", slots),
        )

    def _relaunch(self) -> None:
        """Note a broken rule when no member is left although the iteration is not finished, and start all slots again.

        If the trainer's machine generates, no other member is needed; a later check verifies that it does.
        """
        if self._history.absence is not None:
            return
        if self._ledger.is_closed or self._starts_pending or any(not one.dead for one in self._members.values()):
            return
        if self._is_finished():
            return
        self._counts["relaunches"] += 1
        self._ledger.breaks("livelock: every member has left, and the iteration is not finished")
        self._ledger.tell("operator", "starts all slots again")
        for slot in range(len(self._history.plan.slots)):
            self._schedule_member(slot, 0.0)

    def _is_finished(self) -> bool:
        reader = JournalReader(self._ledger.store, self._history.plan, 1)
        try:
            reader.refresh()
            return all(reader.assemble(response).finish.ends_response for response in self._truth)
        except CorruptObject:  # the checks at the end report it
            return True

    # Faults.

    def _schedule_strike(self, strike: Strike) -> None:
        self._timeline.at(strike.at_s, lambda: self._strike(strike))

    def _strike(self, strike: Strike) -> None:
        self._counts[f"strike: {strike.kind}"] += 1
        self._ledger.note_fault(strike.duration_s if strike.kind in LASTING else 0.0)
        living = [member for member, process in sorted(self._members.items()) if not process.dead]
        if strike.kind == "outage":
            self._change_weather(self._history.outage, "outage")
            self._timeline.after(strike.duration_s, self._end_outage)
        elif strike.kind == "mass":
            for member in living:
                if self._rng.random() < 0.8:
                    self._preempt(member, strike.duration_s)
        elif strike.kind in ("trainer kill", "trainer freeze"):
            self._strike_trainer(strike)
        elif living:
            self._strike_member(self._rng.choice(living), strike)

    def _strike_member(self, member: int, strike: Strike) -> None:
        process = self._members[member]
        self._ledger.tell(process.name, f"suffers {strike.kind}, {strike.duration_s:.1f} s")
        if strike.kind == "kill":
            process.kill()
        elif strike.kind == "notice":
            self._preempt(member, strike.duration_s)
        elif strike.kind == "hang":
            if member in self._lives.engines:
                self._lives.engines[member].hang_s = strike.duration_s
        else:
            self._note_stop(process, strike.duration_s)
            process.freeze(strike.duration_s)
            if strike.kind == "suspend":
                process.clock.stop(strike.duration_s)

    def _note_stop(self, process: Machine, duration_s: float) -> None:
        now_s = self._timeline.now_s
        for name in self._names[process.name]:
            self._ledger.note_trouble(name, now_s, now_s + duration_s)

    def _preempt(self, member: int, grace_s: float) -> None:
        process = self._members[member]
        self._counts["preemptions"] += 1
        self._ledger.tell(process.name, f"will be killed, with notice of {grace_s:.1f} s")
        if grace_s:
            self._noticed.add(process.name)
        self._timeline.after(grace_s + self._rng.uniform(0, 3), process.kill)

    def _strike_trainer(self, strike: Strike) -> None:
        process = self._trainer
        if process is None or process.dead:
            return
        self._ledger.tell(process.name, f"suffers {strike.kind}, {strike.duration_s:.1f} s")
        if strike.kind == "trainer kill":
            process.kill()
        else:  # its successor works by the time it goes on
            self._note_stop(process, strike.duration_s)
            process.freeze(strike.duration_s)
            self._timeline.after(0.7 * strike.duration_s, self._start_trainer)

    def _change_weather(self, rates: FaultRates, name: str) -> None:
        self._ledger.tell("weather", name)
        self._weather = rates
        for store in self._stores.values():
            store.rates = rates

    def _end_outage(self) -> None:
        is_calm = self._timeline.now_s >= self._history.calm_at_s
        self._change_weather(self._history.calm if is_calm else self._history.weather, "outage ends")

    def _behind_faults(self, process: Machine, name: str) -> ObjectStore:
        """The store for a process under a name, which is its own or that of a member in it."""
        rng = random.Random(f"faults {self._history.seed} {name}")
        self._names[process.name].append(name)
        store: ObjectStore = self._ledger.view(name)
        if self._crashes_left and rng.random() < 0.4:
            self._crashes_left -= 1
            store = self._crashing[process.name] = self._crash_in_time(store, rng)
        line = LineClock(process.clock, self._ledger, 20 * self._history.weather.latency_s)
        faulty = FaultyStore(store, self._weather, rng, line, self._later)
        self._stores[name] = faulty
        return WatchedStore(faulty, self._ledger, name, 20 * self._history.weather.latency_s)

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

    # The trainer, the observer, and every process.

    def _start_trainer(self) -> None:
        if not self._ledger.is_closed:
            self._trainers += 1
            self._trainer = self._start(f"{TRAINER}-{self._trainers}", self._train, self._trainer_ended)

    def _train(self, process: Machine) -> None:
        store = self._behind_faults(process, process.name)
        rng = random.Random(f"helping {self._history.seed} {process.name}")
        trainer = SimulatedTrainer(
            self._history,
            store,
            process,
            self._ledger,
            self._truth,
            generate=lambda: self._lives.help_out(process, store, rng),
        )
        trainer.train()

    def _trainer_ended(self, process: Machine, error: BaseException | None) -> None:
        self._ended(process, error)
        if self._ledger.is_closed and not self._are_latecomers_due:
            self._are_latecomers_due = True
            for member, late_s in self._pods.latecomers().items():
                self._schedule_member(member, late_s)
        if error is not None:
            self._timeline.after(self._rng.uniform(*self._history.cold_start_s), self._start_trainer)

    def _observe(self, process: Machine) -> None:
        rng = random.Random(f"line {self._history.seed}")
        store = FaultyStore(self._ledger.view(process.name), self._history.calm, rng, process.clock)
        observe(self._history, store, process, self._ledger, self._truth)

    def _start(
        self,
        name: str,
        main: Callable[[Machine], object],
        on_end: Callable[[Machine, BaseException | None], object],
    ) -> Machine:
        process = Machine(self._timeline, name, main, on_end)
        process.clock = ProcessClock(self._timeline, process, random.Random(f"clock {self._history.seed} {name}"))
        self._timeline.after(0.0, process.start)
        self._ledger.tell(name, "starts")
        return process

    def _ended(self, process: Machine, error: BaseException | None) -> None:
        how = "done" if error is None else type(error).__name__
        self._ledger.ends[process.name] = self._timeline.now_s, how
        if error is not None:
            self._ledger.note_fault()
        self._counts[f"ended: {how}"] += 1
        for thread in process.threads:
            self._timeline.after(0.0, thread.kill)
        self._ledger.tell(process.name, f"ends: {how}{f' {error}' if error is not None else ''}")
        crashing = self._crashing.get(process.name)
        if isinstance(error, Crashed) and crashing is not None and crashing.last_call is not None:
            verb, key = crashing.last_call.split(" ", 1)
            kind = key.removeprefix("iterations/000000/").split("/", 1)[0]
            self._counts[f"crash: {crashing.moment} {verb} {kind}"] += 1
        if isinstance(error, Exception) and not isinstance(error, EXPECTED):
            self._ledger.breaks(f"error: {process.name} ended with {error!r}")
