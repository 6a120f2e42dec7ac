"""A simulated crew: production members and a trainer live through a history, on virtual time and a faulty store.

Session, claims, journal, rebalancing and the trainer's following are the production code; only engine, clock and store
are the deterministic ones. What Flyte does is here: lost members are started again, with another name and a cold start.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from benchmarks.ledger import Ledger
from benchmarks.simulated_history import History, Strike
from benchmarks.simulated_machine import HangingEngine
from benchmarks.simulated_trainer import SimulatedTrainer, observe
from benchmarks.undisturbed import Whole, prompt, undisturbed
from benchmarks.virtual_threads import Machine
from benchmarks.virtual_time import ProcessClock, Timeline
from storage import layout
from storage.assembly import JournalReader
from storage.faults import Crashed, CrashingStore, FaultRates, FaultyStore
from storage.records import TRAIN_POOL
from storage.store import CorruptObject, ObjectStore, StoreUnavailable
from tasks.sampling.engine import Engine, EngineDied
from tasks.sampling.session import Preempted, Session
from tasks.sampling.session_config import SessionConfig

TRAINER, OBSERVER = "trainer", "observer"
RELAUNCH_AFTER_S = 300.0
TURNS_MAX = 50_000
LOAD_PARTS = 4
EXPECTED = (Preempted, StoreUnavailable, EngineDied)
MOMENTS: tuple[Literal["before", "after", "later"], ...] = ("before", "after", "later")


@dataclass
class Outcome:
    """How a history went: the true store, what happened how often, and when everything was over.

    requests_to_bound: the most requests of any member, as a part of what it may make (benchmarks/histories_check.py).
    """

    ledger: Ledger
    truth: Mapping[int, Whole]
    counts: Counter[str]
    ended_at_s: float
    requests_to_bound: float = 0.0

    @property
    def broken(self) -> list[str]:
        """Every rule that did not hold, with its kind before the colon."""
        return self.ledger.broken


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
        self._engines: dict[int, HangingEngine] = {}
        self._noticed: set[str] = set()
        self._starts_pending = 0
        self._trainer: Machine | None = None
        self._trainers = 0
        self._counts: Counter[str] = Counter()

    def run(self) -> Outcome:
        """Live through the history until nothing is left to happen, zombies included."""
        for member, arrival_s in enumerate(self._history.arrivals_s):
            self._schedule_member(member, arrival_s)
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
        """When even the slowest member alone would long have decoded everything after the calm."""
        history = self._history
        tokens = sum(len(whole.token_ids) for whole in self._truth.values())
        slowest_s = max(speed.step_s(history.in_flight) for speed in history.speeds)
        standing_s = sum(strike.duration_s for strike in history.strikes) + 10 * history.weather.pause_s[1]
        waiting_s = 2 * RELAUNCH_AFTER_S + 20 * history.claim_ttl_s
        return history.calm_at_s + standing_s + waiting_s + 2 * tokens * slowest_s

    # Members and what Flyte does with them.

    def _schedule_member(self, member: int, delay_s: float) -> None:
        self._starts_pending += 1
        self._timeline.after(delay_s, lambda: self._start_member(member))

    def _start_member(self, member: int) -> None:
        self._starts_pending -= 1
        if self._ledger.is_closed:
            return
        self._counts["joins" if self._joins(member) else "starts"] += 1
        name = f"{member:05d}-{self._rng.getrandbits(64):016x}"
        self._members[member] = self._start(
            name, lambda process: self._live(process, member), lambda process, error: self._lost(process, member, error)
        )

    def _joins(self, member: int) -> bool:
        return member >= len(self._history.plan.slots)

    def _live(self, process: Machine, member: int) -> None:
        history = self._history
        rng = random.Random(f"member {history.seed} {process.name}")

        def load(into: Engine, heed: Callable[[], None]) -> None:
            for _ in range(LOAD_PARTS):
                heed()
                process.clock.sleep(rng.uniform(*history.cold_start_s) / LOAD_PARTS)
            into.load_weights(history.plan.weight_version, {})

        def notice() -> bool:
            # Asked once between two steps, in the session's own thread: there it may also hand something over.
            if rng.random() < history.hand_over:
                session.hand_over(rng.sample(range(history.plan.num_responses), 3))
            return process.name in self._noticed

        session = Session(
            self._behind_faults(process),
            history.plan,
            prompts=[prompt(group) for group in range(history.plan.num_groups)],
            engine=self._new_engine(process, member),
            load=load,
            config=self._session_config(process, member),
            clock=process.clock,
            notice=notice,
            incarnation=process.name,
        )
        session.run()
        self._check_leaving(process, member)

    def _check_leaving(self, process: Machine, member: int) -> None:
        """Who ends by itself leaves no thread, and a planned slot nothing of its own unit unfinished.

        Where members cut, it may leave what another slot of the crew has had since: that one answers for it.
        """
        if any(not thread.dead for thread in process.threads):
            self._ledger.breaks(f"error: {process.name} ended and left a thread running")
        stays_s = self._history.stays_s[member]
        if self._joins(member) or self._ledger.is_closed or stays_s is not None:
            return
        reader = JournalReader(self._ledger.store, self._history.plan, 1)
        reader.refresh()
        left = [r for r in self._history.plan.responses_of(member) if not reader.assemble(r).finish.ends_response]
        if self._history.cut_share is not None:
            self._counts["members that left after a cut"] += bool(left)
            left = [response for response in left if not self._is_answered_for(reader, response, member)]
        if left:
            self._ledger.breaks(f"livelock: {process.name} left although {left} of its own unit had not ended")

    def _is_answered_for(self, reader: JournalReader, response: int, member: int) -> bool:
        """Whether another slot of the crew has, or has had, the response."""
        owner = reader.book.owner(response)
        names = {*reader.book.former_owners(response), *([owner.incarnation] if owner else [])}
        slots = {reader.book.incarnations[name] for name in names} - {member}
        return any(self._history.is_crew(slot) for slot in slots)

    def _new_engine(self, process: Machine, member: int) -> HangingEngine:
        rng = random.Random(f"engine {self._history.seed} {process.name}")

        def dies(probability: float) -> bool:
            if rng.random() >= probability or self._timeline.now_s >= self._history.calm_at_s:
                return False
            self._counts["engine deaths"] += 1
            self._ledger.tell(process.name, "its engine dies")
            return True

        engine = self._engines[member] = HangingEngine(self._history, member, process.clock, dies)
        return engine

    def _session_config(self, process: Machine, member: int) -> SessionConfig:
        history, in_crew = self._history, self._history.is_crew(member)
        return SessionConfig(
            slot=member,
            pool=history.pool(member),
            host="simulated",
            pid=1,
            started_at_s=process.clock.wall(),
            flush_interval_s=history.flush_interval_s,
            heartbeat_interval_s=history.heartbeat_interval_s,
            claim_ttl_s=history.claim_ttl_s,
            idle_timeout_s=history.idle_timeout_s,
            time_limit_s=history.stays_s[member],
            objective=history.objective if in_crew else "makespan",
            cut_share=history.cut_share if in_crew else None,
            engine_restarts_max=2,
            parallel_reads=1,
        )

    def _lost(self, process: Machine, member: int, error: BaseException | None) -> None:
        self._ended(process, error)
        if error is not None and self._comes_again(member, error):
            self._schedule_member(member, self._rng.uniform(*self._history.cold_start_s))
        else:
            self._timeline.after(RELAUNCH_AFTER_S, self._relaunch)

    def _comes_again(self, member: int, error: BaseException) -> bool:
        """The crew always; the trainer's machine does not seed again when its engine died, or it has begun to train."""
        if self._history.pool(member) == TRAIN_POOL:
            return not isinstance(error, EngineDied) and layout.batch(0, 0) not in self._ledger.created
        return not self._joins(member) or self._rng.random() < 0.3

    def _relaunch(self) -> None:
        """Nobody may be left as long as the iteration is not finished; then an operator would have to help."""
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
        except CorruptObject:  # the checks at the end say what it is
            return True

    # What goes wrong.

    def _schedule_strike(self, strike: Strike) -> None:
        self._timeline.at(strike.at_s, lambda: self._strike(strike))

    def _strike(self, strike: Strike) -> None:
        self._counts[f"strike: {strike.kind}"] += 1
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
            if member in self._engines:
                self._engines[member].hang_s = strike.duration_s
        else:
            process.freeze(strike.duration_s)
            if strike.kind == "suspend":
                process.clock.stop(strike.duration_s)

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
        else:  # its successor is at work when it goes on
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

    def _behind_faults(self, process: Machine) -> ObjectStore:
        rng = random.Random(f"faults {self._history.seed} {process.name}")
        store: ObjectStore = self._ledger.view(process.name)
        if self._crashes_left and rng.random() < 0.4:
            self._crashes_left -= 1
            store = self._crashing[process.name] = self._crash_in_time(store, rng)
        faulty = FaultyStore(store, self._weather, rng, process.clock, self._later)
        self._stores[process.name] = faulty
        return faulty

    def _crash_in_time(self, store: ObjectStore, rng: random.Random) -> CrashingStore:
        """Its process dies at one of its first calls: half of the time at a write, of which there are few."""
        writes_only = rng.random() < 0.5
        at_call = int(rng.expovariate(1 / (6 if writes_only else 20)))
        moment, delay_s = rng.choice(MOMENTS), rng.uniform(0, 40)
        return CrashingStore(store, at_call, moment, writes_only=writes_only, later=self._later, delay_s=delay_s)

    def _later(self, delay_s: float, request: Callable[[], object]) -> None:
        def arrives() -> None:
            with suppress(Crashed):  # its process has died since, and nobody hears the answer
                request()

        self._timeline.after(delay_s, arrives)

    # The trainer, the observer, and every process.

    def _start_trainer(self) -> None:
        if not self._ledger.is_closed:
            self._trainers += 1
            self._trainer = self._start(f"{TRAINER}-{self._trainers}", self._train, self._trainer_ended)

    def _train(self, process: Machine) -> None:
        store = self._behind_faults(process)
        SimulatedTrainer(self._history, store, process, self._ledger, self._truth).train()

    def _trainer_ended(self, process: Machine, error: BaseException | None) -> None:
        self._ended(process, error)
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
        self._counts[f"ended: {how}"] += 1
        for thread in process.threads:
            self._timeline.after(0.0, thread.kill)
        self._ledger.tell(process.name, f"ends: {how}{f' {error}' if error is not None else ''}")
        crashing = self._crashing.get(process.name)
        if isinstance(error, Crashed) and crashing is not None and crashing.last_call is not None:
            verb, key = crashing.last_call.split(" ", 1)
            self._counts[f"crash: {crashing.moment} {verb} {key.split('/')[2]}"] += 1
        if isinstance(error, Exception) and not isinstance(error, EXPECTED):
            self._ledger.breaks(f"error: {process.name} ended with {error!r}")
