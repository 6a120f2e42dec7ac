"""A simulated crew that stands: processes that work on all iterations of a history by production's loop and route.

The strikes of each iteration hit the processes wherever they work. This module plays Flyte: lost processes are started
again, some of them a few times only, and frozen processes get successors and wake up beside them. In the last iteration
all come again, because members leave that iteration before it is closed, and the simulated trainer does not generate.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from simulation.ledger_of_run import LedgerOfRun
from simulation.simulated_crew import EXPECTED, SimulatedCrew
from simulation.simulated_history import History
from simulation.simulated_lines import Lines, started
from simulation.simulated_machine import HangingEngine
from simulation.simulated_member import EXECUTION
from simulation.simulated_session import Machine
from simulation.virtual_time import Timeline
from storage.records import layout
from storage.records.records import PlanRecord
from storage.records.run import exists, lease_holder
from storage.stores.store import ObjectMissing, ObjectStore
from storage.weights.versions import pull_version
from tasks.sampling.session.route import Route
from tasks.sampling.session.session_outcome import EngineHealth, SessionOutcome
from tasks.sampling.session.standing import Standing, slot_in

# Numbers of standing members among an iteration's processes; its own members have the numbers of slots and beyond.
FIRST_NUMBER = 1000
COMES_LATE_S = 300.0
POLL_S = 0.5
# How many lives Flyte gives a member before the last iteration; the first has any number, so that an iteration can end.
LIVES = (math.inf, math.inf, 1, 4)


class WatchedRoute(Route):
    """The route of a standing member, and when it last began to look who holds the lease."""

    def __init__(self, timeline: Timeline, store: ObjectStore, last: int) -> None:
        super().__init__(store, EXECUTION, 0, last)
        self._timeline = timeline
        self.looked_at_s = math.inf

    def is_given_up(self) -> bool:
        """As production's."""
        self.looked_at_s = self._timeline.now_s
        return super().is_given_up()


class StandingCrew:
    """The standing members of a history. crews: its iterations as far as they have begun."""

    def __init__(
        self,
        history: History,
        size: int,
        timeline: Timeline,
        ledger: LedgerOfRun,
        crews: Sequence[SimulatedCrew],
        counts: Counter[str],
    ) -> None:
        self.processes: dict[int, Machine] = {}
        self._history = history
        self._timeline = timeline
        self._ledger = ledger
        self._crews = crews
        self._counts = counts
        self._rng = random.Random(f"standing {history.seed}")
        self._lives_left = [math.inf, *(self._rng.choice(LIVES) for _ in range(size - 1))]
        self._starts: Counter[int] = Counter()
        self._gone: set[int] = set()
        self._routes: dict[str, WatchedRoute] = {}
        self._calm = replace(history, weather=history.calm)

    def begin(self) -> None:
        """Start all members, some of them late."""
        for member in range(len(self._lives_left)):
            late_s = COMES_LATE_S if self._rng.random() < 0.1 else 15.0
            self._timeline.after(self._rng.uniform(0, late_s), partial(self._start, member))

    def begin_last(self) -> None:
        """Start those that are gone for good; the others are there, or are being started."""
        for member in sorted(self._gone):
            self._timeline.after(self._rng.uniform(*self._history.cold_start_s), partial(self._start, member))

    def note_stop(self, process: Machine, duration_s: float) -> None:
        """Note in every iteration that a process stands still; sometimes Flyte starts a successor, as after a loss."""
        for crew in self._crews:
            crew.lines.note_stop(process, duration_s)
        member = next((k for k, known in self.processes.items() if known is process), None)
        if member is not None and self._rng.random() < 0.5:
            self._counts["standing members followed while frozen"] += 1
            self._timeline.after(0.5 * duration_s, partial(self._start, member - FIRST_NUMBER))

    def _start(self, member: int) -> None:
        if self._lives_left[member] <= 0 and not self._is_last:
            self._gone.add(member)
            return
        if self._is_over():
            return
        self._lives_left[member] -= 1
        self._starts[member] += 1
        self._counts["standing members started"] += 1
        name = f"standing{member}.{self._starts[member]}"
        process = started(
            self._timeline,
            self._ledger.common,
            self._history.seed,
            name,
            partial(self._live, member),
            partial(self._ended, member),
        )
        self.processes[FIRST_NUMBER + member] = process
        for crew in self._crews:
            crew.cast.members[FIRST_NUMBER + member] = process

    def _live(self, member: int, process: Machine) -> None:
        store = Lines(self._calm, self._timeline, self._ledger.common).connect_calmly(process, process.name)
        rng = random.Random(f"{process.name} {self._history.seed}")
        engine = HangingEngine(
            self._history,
            member % len(self._history.speeds),
            process.clock,
            lambda _: False,
            self._ledger.common,
            process.name,
        )

        health = EngineHealth()

        def work(plan: PlanRecord, enough: Callable[[], bool] | None) -> SessionOutcome:
            while len(self._crews) <= plan.iteration:
                process.clock.sleep(POLL_S)
            crew, slot = self._crews[plan.iteration], slot_in(store, plan, member)
            return crew.lives.stand_in(process, FIRST_NUMBER + member, slot, engine, rng, notice, enough, health=health)

        def warm(route: Route) -> bool:
            version = route.newer_weights(engine.weight_version)
            if version is None:
                return False
            self._counts["weights loaded while standing by"] += 1
            try:
                engine.load_weights(version, pull_version(store, version, None, process.clock)[1])
            except ObjectMissing:
                self._counts["weights swept while standing by"] += 1
            return True

        def notice() -> bool:
            return any(process.name in crew.cast.noticed for crew in self._crews)

        route = self._routes[process.name] = WatchedRoute(self._timeline, store, self._history.iterations - 1)
        Standing(route, work, warm, notice, process.clock, process.name, health).stand()

    def _ended(self, member: int, process: Machine, error: BaseException | None) -> None:
        how, common = "done" if error is None else type(error).__name__, self._ledger.common
        self._counts[f"standing: {how}"] += 1
        common.tell(process.name, f"ends: {how}{f' {error}' if error is not None else ''}")
        for thread in process.threads:
            self._timeline.after(0.0, thread.kill)
        refuses = any(crew.refuses for crew in self._crews)
        if isinstance(error, Exception) and not isinstance(error, EXPECTED) and not refuses:
            common.breaks(f"error: {process.name} ended with {error!r}")
        if error is None and self._is_last:
            # That it may leave the last iteration was checked when its session ended. Flyte starts it no more.
            return
        if error is None:
            if self._held_since_s() < self._routes[process.name].looked_at_s:
                common.breaks(f"livelock: {process.name} left before the last iteration was planned")
            self._lives_left[member] += 1
        self._timeline.after(self._rng.uniform(*self._history.cold_start_s), partial(self._start, member))

    def _held_since_s(self) -> float:
        """Since when the execution holds the lease; infinity if it does not."""
        store = self._ledger.common.store
        if lease_holder(store) != EXECUTION:
            return math.inf
        newest = max(key for key in store.list(layout.LEASE) if key != layout.LEASE_BEAT)
        return self._ledger.common.created_at_s[newest]

    @property
    def _is_last(self) -> bool:
        """Whether the last iteration is planned."""
        return len(self._crews) == self._history.iterations

    def _is_over(self) -> bool:
        return exists(self._ledger.store, layout.closed(self._history.iterations - 1))
