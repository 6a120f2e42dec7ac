"""A simulated run: the iterations of a history on one timeline and one store, and the work of Flyte in between.

The path is plan, train, conclude, and the next plan. A task that dies is started again; sometimes a frozen task gets a
successor and wakes up beside it. Sweeps of the operator run beside everything. Members and trainers of an iteration
that is over go on as zombies during the next iteration.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from simulation.judge_run import check_rows
from simulation.ledger import Ledger
from simulation.ledger_of_run import LedgerOfRun
from simulation.simulated_crew import EXPECTED, TURNS_MAX, Outcome, SimulatedCrew
from simulation.simulated_history import SLOWEST_CLOCK, History, draw_next
from simulation.simulated_lines import Lines, started
from simulation.simulated_member import EXECUTION
from simulation.simulated_path import (
    LEASE_TTL_S,
    conclude,
    config_of,
    plan_next,
    succeeds_release,
    swept_by,
    takes_lease,
)
from simulation.simulated_session import Machine
from simulation.simulated_standing import StandingCrew
from simulation.virtual_time import Timeline
from storage.journal.compaction import read_responses
from storage.records.records import PlanRecord
from storage.records.run import ConcludedByAnother, RunBusy, next_iteration, read_plan
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore, StoreDenied

# How long the tasks of the path may take beyond what an iteration may.
PATH_LIMIT_S = 5000.0
# So many attempts of a task meet faults; the next ones do not.
FAULTY_ATTEMPTS = 3
# A task that has failed so often will not succeed.
ATTEMPTS_MAX = 12
# How many processes read a concluded iteration while it may be swept.
READS = 3
# How much later than it was written a sign of life may be seen.
WAIT_S = 15.0
RIVAL = "another"
Work = Callable[[ObjectStore, Machine], object]


def _nothing(_: object) -> None:
    """What follows on the last task."""


class SimulatedRun:
    """The iterations of one history. Without a path, the single iteration ends when closed."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._rng = random.Random(f"turns {history.seed}")
        self._timeline = Timeline(self._rng, PATH_LIMIT_S, TURNS_MAX)
        self._of_path = random.Random(f"path {history.seed}")
        self._crews: list[SimulatedCrew] = []
        self._counts: Counter[str] = Counter()
        self._standing: StandingCrew | None = None
        self._has_path = history.iterations > 1
        self.ledger = LedgerOfRun(self._timeline)
        self._config = config_of(history) if self._has_path else None
        self._calm = replace(history, weather=history.calm)
        self._done: set[str] = set()
        if self._config is not None and history.stands:
            size = max(len(history.plan.slots), self._config.pools.rollout.count)
            self._standing = StandingCrew(history, size, self._timeline, self.ledger, self._crews, self._counts)

    def run(self) -> list[Outcome]:
        """Run until no event is left, zombies included; returns the course of each iteration, at least one."""
        if self._has_path:
            self._plan(0)
            self._timeline.after(self._of_path.uniform(0, 600), self._start_rival)
        else:
            self._begin(self._history, None)
            self._crews[0].train()
        if not self._timeline.run():
            now_s, turns = self._timeline.now_s, self._timeline.turns
            self.ledger.common.breaks(f"livelock: no end by {now_s:.0f} s and {turns} turns")
        elif self._has_path and len(self._crews) < self._history.iterations:
            self.ledger.common.breaks(f"livelock: the run ended after {len(self._crews)} iterations")
        outcomes = [crew.outcome() for crew in self._crews]
        outcomes[0].counts.update(self._counts)
        return outcomes

    def _begin(self, history: History, trained: Callable[[], None] | None) -> None:
        crew = SimulatedCrew(history, self._timeline, self._rng, self.ledger.begin, trained, self._standing)
        self._crews.append(crew)
        crew.begin()
        if self._standing is not None and len(self._crews) == 1:
            self._standing.begin()
        elif self._standing is not None and len(self._crews) == self._history.iterations:
            self._standing.begin_last()

    # The path.

    def _plan(self, iteration: int) -> None:
        def work(store: ObjectStore, process: Machine) -> PlanRecord:
            assert self._config is not None
            ahead = min(self._history.ahead, iteration)
            try:
                return plan_next(store, self._history.plan, self._config, EXECUTION, process.clock, ahead=ahead)
            except (CorruptObject, ObjectMissing):
                # One that wakes up when its iteration is concluded may find swept what training began from.
                if next_iteration(self.ledger.store) <= iteration:
                    raise
                return read_plan(store, iteration)

        def then(plan: object) -> None:
            assert isinstance(plan, PlanRecord)
            if plan.iteration != iteration:
                self.ledger.common.breaks(f"doubled: iteration {plan.iteration} was planned in place of {iteration}")
            known = replace(self._history, plan=plan)
            self._begin(draw_next(known, plan) if iteration else known, lambda: self._conclude(iteration))
            begins = min(self._history.ahead, self._history.iterations - 1)
            if iteration < begins:
                self._plan(iteration + 1)
            else:
                self._crews[iteration - begins].train()

        self._task(f"plan{iteration}", 1, work, then)

    def _conclude(self, iteration: int) -> None:
        last = iteration + 1 == self._history.iterations

        def work(store: ObjectStore, process: Machine) -> None:
            conclude(store, iteration, self._history.flush_interval_s, EXECUTION, process.clock, last=last)

        for number in range(self._of_path.choice((0, 0, 1, 2))):
            sweeps = partial(self._task, f"sweep{iteration}.{number}", 1, lambda store, _: swept_by(store), _nothing)
            self._timeline.after(self._of_path.uniform(0, 60), sweeps)
        for number in range(READS):
            reads = partial(self._start_reader, f"reader{iteration}.{number}")
            self._timeline.after(self._of_path.uniform(0, 60), reads)
        self._task(f"conclude{iteration}", 1, work, lambda _: self._go_on(iteration))

    def _go_on(self, concluded: int) -> None:
        """What follows on a conclusion: the plan of the next iteration that has none, or else training."""
        following = concluded + 1 + self._history.ahead
        if following < self._history.iterations:
            self._plan(following)
        elif concluded + 1 < self._history.iterations:
            self._crews[concluded + 1].train()

    def _start_reader(self, name: str) -> None:
        """Start a process that reads all concluded iterations while sweeps may delete objects."""
        common, history = self.ledger.common, self._history

        def main(process: Machine) -> None:
            store = Lines(self._calm, self._timeline, common).connect_calmly(process, f"{name} {history.seed}")
            for crew in self._crews:
                if crew.is_trained:
                    rows = list(read_responses(store, crew.iteration))
                    check_rows(self.ledger, crew.history.plan, crew.truth, rows)

        started(self._timeline, common, history.seed, name, main, self._note_end)

    def _start_rival(self) -> None:
        """Start a second execution that wants the lease, which it may get only if this run shows no sign of life."""
        common, history = self.ledger.common, self._history

        def main(process: Machine) -> None:
            store = Lines(self._calm, self._timeline, common).connect_calmly(process, f"rival {history.seed}")
            began_s = self._timeline.now_s
            gets = takes_lease(store, RIVAL, process.clock)
            self._counts[f"another execution {'gets the lease' if gets else 'finds the run busy'}"] += 1
            # The last look is a poll interval before the end, and each takes its time.
            ended_s = self._timeline.now_s
            is_hasty = ended_s - began_s < LEASE_TTL_S * SLOWEST_CLOCK
            if (
                gets
                and not succeeds_release(self.ledger.store, RIVAL)
                and (is_hasty or self.ledger.beats_between(began_s + WAIT_S, ended_s - WAIT_S))
            ):
                common.breaks("doubled: another execution got the lease of one that lives")

        started(self._timeline, common, history.seed, "rival", main, self._note_end)

    def _task(self, name: str, attempt: int, work: Work, then: Callable[[object], None]) -> None:
        """Start an attempt of a task; further ones follow until the first has succeeded."""
        if name in self._done:
            return
        if attempt == 1:
            self._timeline.allow(PATH_LIMIT_S, TURNS_MAX)
        rng = random.Random(f"{name} {attempt} {self._history.seed}")

        def main(process: Machine) -> None:
            result = work(self._line(process, attempt), process)
            if name not in self._done:
                self._done.add(name)
                then(result)

        def ended(process: Machine, error: BaseException | None) -> None:
            self._note_end(process, error)
            if error is not None and attempt < ATTEMPTS_MAX:
                self._timeline.after(rng.uniform(*self._history.cold_start_s), again)

        def again() -> None:
            self._task(name, attempt + 1, work, then)

        process = started(self._timeline, self.ledger.common, self._history.seed, f"{name}-{attempt}", main, ended)
        if attempt < FAULTY_ATTEMPTS and rng.random() < 0.3:
            self._freeze(process, rng, again)

    def _freeze(self, process: Machine, rng: random.Random, again: Callable[[], None]) -> None:
        """Freeze a task somewhere in its work; another attempt begins meanwhile."""
        duration_s, after_s = rng.uniform(20, 300), rng.uniform(0, 100 * self._history.weather.latency_s)

        def freeze() -> None:
            if not process.dead:
                self._counts["tasks of the path frozen"] += 1
                process.freeze(duration_s)
                self._timeline.after(0.5 * duration_s, again)

        self._timeline.after(after_s, freeze)

    def _line(self, process: Machine, attempt: int) -> ObjectStore:
        history = replace(self._calm, crashes=0)
        if attempt < FAULTY_ATTEMPTS:
            weather = replace(self._history.weather, denied=self._of_path.choice((0.0, 0.0, 0.0, 0.02)))
            history = replace(self._history, weather=weather, crashes=1)
        lines = Lines(history, self._timeline, self.ledger.common)
        return lines.connect(process, process.name)

    def _note_end(self, process: Machine, error: BaseException | None) -> None:
        how = "done" if error is None else type(error).__name__
        ledger: Ledger = self.ledger.common
        self._counts[f"path: {process.name[:4]} {how}"] += 1
        ledger.tell(process.name, f"ends: {how} {error or ''}")
        expected = (*EXPECTED, StoreDenied, RunBusy, ConcludedByAnother)
        if isinstance(error, Exception) and not isinstance(error, expected):
            ledger.breaks(f"error: {process.name} ended with {error!r}")
