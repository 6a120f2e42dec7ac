"""Several runs on one host in virtual time: the slowdown of the cycles against a trainer of its own. Pure.

A run generates responses, then the phase of the run is due, waits for the trainer, and is trained. The trainer trains
one phase at a time in the order of production (`phase_order`), and needs a switch time when the resident run changes.
On an idle trainer a member may generate by the rule of production (`backfill`). The model leaves out storage, grading,
states that do not fit in host memory, and faults.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from storage.fleet.fleet_records import AdmittedRun
from storage.fleet.spent_records import SpentEntry, SpentKind
from tasks.sharing.backfill import choose_backfill
from tasks.sharing.phase_order import DueRun, next_run
from tasks.sharing.residents import expected_s
from tasks.sharing.state_cache import Need

# Looks of an idle trainer per `quiet_s`, for a member to begin.
LOOKS_PER_QUIET = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Helping:
    """How a member generates on an idle trainer.

    Attributes:
        quiet_s: `backfill_s` of HostSettings.
        start_s: Seconds until the member's engine decodes.
        notice_s: Seconds from a due phase until the member has left.
        divisible: The first part of a rollout, from 0 to 1, which more machines shorten. In the rest the longest
            responses end, which no further machine can hasten.
    """

    quiet_s: float
    start_s: float
    notice_s: float = 5.0
    divisible: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The settings common to the runs of a simulated host.

    Attributes:
        switch_s: Seconds of the trainer at a change of the resident run.
        slowdown_max: The fleet's limit, for the order of phases.
        rollout_cv: Coefficient of variation of log-normal rollout times, for runs without a value of their own.
        phase_cv: Coefficient of variation of log-normal phase times, for runs without a value of their own.
        correlation: The part, from 0 to 1, of the variance of the n-th rollout that is common to all runs.
        together: All runs begin at time 0 instead of at random moments of a cycle.
        helping: A member generates on the idle trainer; runs then need a number of rollout GPUs. None: no member.
    """

    switch_s: float
    slowdown_max: float = 1.1
    rollout_cv: float = 0.2
    phase_cv: float = 0.1
    correlation: float = 0.0
    together: bool = False
    helping: Helping | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """The result of a run. Times are seconds.

    Attributes:
        run: The run's id.
        began_s: The beginning of the first counted rollout.
        ended_s: The end of the last phase.
        alone_s: The duration of the counted rollouts and phases with a trainer of its own.
        waited_s: Per phase, the seconds from falling due to the order to begin.
    """

    run: str
    began_s: float
    ended_s: float
    alone_s: float
    waited_s: tuple[float, ...]

    @property
    def slowdown(self) -> float:
        """The run's time on the shared trainer over the run's time alone.

        At least 1 if all iterations count and no member helped, because a wait never hastens a later end.
        """
        return (self.ended_s - self.began_s) / self.alone_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTrainer:
    """The results of a simulated host.

    Attributes:
        runs: The result of each run, in the order given.
        entries: The host's time by kind, without gaps. The host never waits for groups, and a "switch" entry includes
            the parking of the previous state.
    """

    runs: tuple[SharedRun, ...]
    entries: tuple[SpentEntry, ...]

    def part(self, kind: SpentKind) -> float:
        """The part of the trainer's time that was spent on `kind`."""
        return math.fsum(each.seconds for each in self.entries if each.kind == kind) / self.entries[-1].ended_s

    @property
    def slowdown_mean(self) -> float:
        return math.fsum(run.slowdown for run in self.runs) / len(self.runs)


@dataclass(slots=True)
class _Cycle:
    """A run between two phases: phase n is due when rollout n and phase n - 1 have ended.

    Rollout n begins when rollout n - 1 and phase n - 1 - ahead have ended.

    Attributes:
        ahead: Iterations that the rollout runs ahead of training.
        rolled_s: The end of the present rollout.
        ended_s: The end of each phase.
    """

    ahead: int
    rolled_s: float
    ended_s: list[float] = field(default_factory=list)

    @property
    def free_s(self) -> float:
        """When the last phase ended."""
        return self._ended_s(len(self.ended_s) - 1)

    def _ended_s(self, phase: int) -> float:
        return self.ended_s[phase] if phase >= 0 else -math.inf

    def due_s(self, rollout_s: float) -> float:
        """When the next phase is due after a rollout of `rollout_s`. To be called once for each phase."""
        self.rolled_s = max(self.rolled_s, self._ended_s(len(self.ended_s) - 1 - self.ahead)) + rollout_s
        return max(self.rolled_s, self.free_s)


class _Simulated:
    """A simulated run: random draws, the cycle on the shared trainer, and the cycle alone with equal draws."""

    def __init__(self, run: AdmittedRun, given: Conditions, seed: int) -> None:
        self.run = run
        self._given = given
        self._own = random.Random(f"{seed} {run.id}")
        self._common = random.Random(f"{seed} of all runs")
        self.began_s = 0.0 if given.together else self._own.uniform(0.0, run.cycle_s)
        self._cycle = _Cycle(run.rollouts_ahead, self.began_s)
        self._alone = _Cycle(run.rollouts_ahead, self.began_s)
        self.waited_s: list[float] = []
        self.ordered_s = self.began_s
        self._draw()

    def _draw(self) -> None:
        """Draw the next rollout and phase. Each iteration draws equally often, so that no order changes a draw."""
        given, run = self._given, self.run
        common, own = self._common.gauss(0.0, 1.0), self._own.gauss(0.0, 1.0)
        normal = math.sqrt(given.correlation) * common + math.sqrt(1.0 - given.correlation) * own
        generating_s = run.cycle_s if run.rollouts_ahead else max(0.0, run.cycle_s - run.phase_s)
        rollout_cv = given.rollout_cv if run.rollout_cv is None else run.rollout_cv
        phase_cv = given.phase_cv if run.phase_cv is None else run.phase_cv
        rollout_s = generating_s * _factor(normal, rollout_cv)
        self.phase_s = run.phase_s * _factor(self._own.gauss(0.0, 1.0), phase_cv)
        self.due_s = self._cycle.due_s(rollout_s)
        self._rollout_s = rollout_s
        self._alone.ended_s.append(self._alone.due_s(rollout_s) + self.phase_s)
        self.iteration = len(self._cycle.ended_s)

    def train(self, at_s: float, ended_s: float) -> None:
        """Note that the due phase was ordered to begin at `at_s` and ended at `ended_s`."""
        self.ordered_s = at_s
        self.waited_s.append(at_s - self.due_s)
        self._cycle.ended_s.append(ended_s)
        self._draw()

    def unfinished(self, now_s: float) -> float:
        """The rest of the present rollout, in seconds of a single GPU."""
        return max(0.0, self._cycle.rolled_s - now_s) * self.run.rollout_gpus

    def saved_s(self, from_s: float, to_s: float, divisible: float) -> float:
        """Seconds by which the rollout shortens if the trainer's GPUs generate, too, from `from_s` to `to_s`."""
        speed = self.run.trainer_gpus / self.run.rollout_gpus
        ends_s = self._cycle.rolled_s - (1.0 - divisible) * self._rollout_s
        return max(0.0, min(to_s - from_s, (ends_s - from_s) / (1.0 + speed))) * speed

    def help(self, saved_s: float) -> None:
        """End the present rollout `saved_s` seconds sooner."""
        self._cycle.rolled_s -= saved_s
        self.due_s = max(self._cycle.rolled_s, self._cycle.free_s)

    def need(self, now_s: float) -> Need:
        """When the host expects its next phase."""
        return Need(self.run, expected_s(self.ordered_s, self.run.cycle_s, now_s))

    def due(self, now_s: float) -> DueRun:
        return DueRun(
            id=self.run.id,
            waited_s=now_s - self.due_s,
            expected_s=self.run.phase_s,
            wait_s_max=self.run.wait_s_max(self._given.slowdown_max),
            share=self.run.share,
        )

    def result(self, first: int) -> SharedRun:
        """The result from iteration `first` on."""
        done = len(self._cycle.ended_s)
        return SharedRun(
            run=self.run.id,
            began_s=self._cycle.ended_s[first - 1] if first else self.began_s,
            ended_s=self._cycle.ended_s[-1],
            alone_s=self._alone.ended_s[done - 1] - (self._alone.ended_s[first - 1] if first else self.began_s),
            waited_s=tuple(self.waited_s[first:]),
        )


def share_trainer(
    runs: Sequence[AdmittedRun], given: Conditions, *, iterations: int, seed: int, settled: int = 0
) -> SharedTrainer:
    """Simulate runs on one host until every run has trained `iterations` counted iterations; faster runs train more.

    settled: counting begins when every run has trained this many iterations, because the trainer is idle at first and
    phases wait less than later. The result is a function of the arguments, and does not depend on the order of the
    runs. Time grows in proportion to the iterations, and to the longest cycle over the shortest. Raises ValueError
    without a run, for two runs with equal ids, or if a member should help a run whose rollout GPUs are unknown.
    """
    by_id = {run.id: _Simulated(run, given, seed) for run in runs}
    if not runs or len(by_id) < len(runs):
        raise ValueError(f"runs: value {[run.id for run in runs]}; allowed: at least one, each id once")
    if given.helping is not None and not all(run.rollout_gpus for run in runs):
        raise ValueError("rollout_gpus: value 0; allowed where a member helps: 1 or more")
    now_s, resident = 0.0, None
    entries: list[SpentEntry] = []

    def spend(kind: SpentKind, until_s: float, run: str | None = None, iteration: int | None = None) -> None:
        nonlocal now_s
        if until_s > now_s:
            entries.append(SpentEntry(kind=kind, run=run, iteration=iteration, began_s=now_s, ended_s=until_s))
            now_s = until_s

    first: dict[str, int] = {}
    while True:
        trained = {name: len(each.waited_s) for name, each in by_id.items()}
        if not first and min(trained.values()) >= settled:
            first = trained
        if first and all(trained[name] >= first[name] + iterations for name in by_id):
            break
        while (due_s := min(each.due_s for each in by_id.values())) > now_s:
            helped, until_s = _help(by_id, given.helping, now_s, due_s)
            spend("idle" if helped is None else "backfill", until_s, helped)
        chosen = next_run([each.due(now_s) for each in by_id.values() if each.due_s <= now_s])
        assert chosen is not None, f"no phase is due at {now_s}"
        run, ordered_s = by_id[chosen.id], now_s
        if resident not in (None, chosen.id):
            spend("switch", now_s + given.switch_s, chosen.id, run.iteration)
        resident = chosen.id
        spend("train", now_s + run.phase_s, chosen.id, run.iteration)
        run.train(ordered_s, now_s)
    return SharedTrainer(runs=tuple(by_id[run.id].result(first[run.id]) for run in runs), entries=tuple(entries))


def _help(runs: Mapping[str, _Simulated], how: Helping | None, now_s: float, due_s: float) -> tuple[str | None, float]:
    """The run that an idle trainer helps (or None), and the time until which; then the trainer chooses again."""
    if how is None:
        return None, due_s
    needs = [each.need(now_s) for each in runs.values()]
    chosen = choose_backfill(needs, {run: each.unfinished(now_s) for run, each in runs.items()}, now_s, how.quiet_s)
    if chosen is None:
        return None, min(due_s, now_s + how.quiet_s / LOOKS_PER_QUIET)
    helped, from_s = runs[chosen], now_s + how.start_s
    others_s = min((each.due_s for run, each in runs.items() if run != chosen), default=math.inf)
    soonest_s = helped.due_s - helped.saved_s(from_s, helped.due_s, how.divisible)
    until_s = min(others_s, max(soonest_s, now_s))
    helped.help(helped.saved_s(from_s, until_s, how.divisible))
    return chosen, until_s + how.notice_s


def saving_bound(runs: float, rollout_gpus: float, trainer_gpus: float) -> float:
    """The greatest share of GPU-hours that `runs` alike runs can save with a common trainer.

    k isolated runs hold k (R + T) GPUs, shared runs at least k R + T; the saving is (k-1)T / (k(R+T)), with R
    `rollout_gpus` and T `trainer_gpus`. Without any GPU the bound is 0.
    """
    whole = runs * (rollout_gpus + trainer_gpus)
    return (runs - 1) * trainer_gpus / whole if whole else 0.0


def saving(slowdown: float, runs: int, rollout_gpus: float, trainer_gpus: float) -> float:
    """The share of GPU-hours that alike runs save if cycles take `slowdown` times as long; negative: a loss.

    1 - s (R + T/k) / (R + T): each run holds R rollout GPUs and a k-th of the trainer for s times as long.
    """
    return 1.0 - slowdown * (rollout_gpus + trainer_gpus / runs) / (rollout_gpus + trainer_gpus)


def _factor(normal: float, cv: float) -> float:
    """A log-normal factor with mean 1 and coefficient of variation `cv`, from a standard normal number."""
    variance = math.log1p(cv * cv)
    return math.exp(math.sqrt(variance) * normal - variance / 2)
