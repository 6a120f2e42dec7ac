"""Several runs on one host in virtual time: how much longer their cycles take than alone. Pure.

A run generates responses, then its phase is due, waits for the trainer, and is trained. The trainer trains one phase
at a time in the order of production (`phase_order`), and needs a switch time when another run becomes the resident.
While it is idle, a member may generate there by the rule of production (`backfill`). Storage, grading, states that do
not fit in host memory, and faults are left out.
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

# How often an idle trainer looks whether no phase is expected for long enough.
LOOKS_PER_QUIET = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Helping:
    """How a member generates on an idle trainer.

    quiet_s: as backfill_s in HostSettings. start_s: until its engine decodes. notice_s: from the moment at which a
    phase is due until it has left. divisible: the part of a rollout, its beginning, that more machines shorten; in the
    rest its longest responses end, which no other machine can hasten.
    """

    quiet_s: float
    start_s: float
    notice_s: float = 5.0
    divisible: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What all runs of a host have in common.

    switch_s: seconds of the trainer when another run becomes the resident. slowdown_max: the fleet's, for the order.
    rollout_cv, phase_cv: coefficients of variation of the log-normal times, of runs that do not tell theirs.
    correlation: the part, from 0 to 1, of the variance of the n-th rollout that all runs have in common. together: all
    runs begin at once, and not at random moments of a cycle. helping: None: the trainer only trains; else runs need
    their GPUs.
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
    """How a run fared. Times are seconds.

    began_s, ended_s: when its first rollout that counts began and its last phase ended. alone_s: how long the same
    rollouts and phases take with a trainer of its own. waited_s: from due to the order to begin, for each phase.
    """

    run: str
    began_s: float
    ended_s: float
    alone_s: float
    waited_s: tuple[float, ...]

    @property
    def slowdown(self) -> float:
        """Its time on the shared trainer over its time alone.

        At least 1 if all iterations count and no member helped, because a wait never hastens a later end.
        """
        return (self.ended_s - self.began_s) / self.alone_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTrainer:
    """How the runs fared, in the order in which they were given, and what the host's time was spent on, without gaps.

    The entries are those of a host that is never waiting for groups; a switch holds the parking of the state before.
    """

    runs: tuple[SharedRun, ...]
    entries: tuple[SpentEntry, ...]

    def part(self, kind: SpentKind) -> float:
        """The part of the trainer's time that was spent so."""
        return math.fsum(each.seconds for each in self.entries if each.kind == kind) / self.entries[-1].ended_s

    @property
    def slowdown_mean(self) -> float:
        return math.fsum(run.slowdown for run in self.runs) / len(self.runs)


@dataclass(slots=True)
class _Cycle:
    """A run between two phases: phase n is due when rollout n and phase n - 1 have ended.

    Rollout n begins when rollout n - 1 and phase n - 1 - ahead have ended.
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
        """When the next phase is due, whose rollout takes so long. To be called once for each phase."""
        self.rolled_s = max(self.rolled_s, self._ended_s(len(self.ended_s) - 1 - self.ahead)) + rollout_s
        return max(self.rolled_s, self.free_s)


class _Simulated:
    """One run: what it draws, its cycle on the shared trainer, and its cycle alone with the same draws."""

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
        """The phase that is due was ordered to begin at the one moment and ended at the other."""
        self.ordered_s = at_s
        self.waited_s.append(at_s - self.due_s)
        self._cycle.ended_s.append(ended_s)
        self._draw()

    def unfinished(self, now_s: float) -> float:
        """What is still to be generated for its present rollout, in seconds of one GPU."""
        return max(0.0, self._cycle.rolled_s - now_s) * self.run.rollout_gpus

    def saved_s(self, from_s: float, to_s: float, divisible: float) -> float:
        """By how much its rollout is shorter if the trainer's GPUs generate, too, in this time."""
        speed = self.run.trainer_gpus / self.run.rollout_gpus
        ends_s = self._cycle.rolled_s - (1.0 - divisible) * self._rollout_s
        return max(0.0, min(to_s - from_s, (ends_s - from_s) / (1.0 + speed))) * speed

    def help(self, saved_s: float) -> None:
        """Its rollout ends so much sooner."""
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
        """How it fared from this iteration on."""
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
    """Simulate runs on one host until each has trained so many iterations; the others go on until then.

    settled: until each run has trained so many iterations, nothing counts in how it fared: at the beginning the trainer
    is idle, so that phases wait less than they do later. The result is a function of the arguments, and the
    order of the runs changes nothing but ties of like ids. It takes time in proportion to the iterations and to the
    longest cycle over the shortest. Raises ValueError if there is no run, if two have one id,
    or if a member is to help a run whose GPUs for rollout are unknown.
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
    """What an idle trainer does: it helps this run, or none, until this moment, at which it may choose again."""
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
    """The most of all GPU-hours that `runs` like runs can save, with so many GPUs each for rollout and one trainer.

    Isolated they hold k (R + T) GPUs, shared at least k R + T; the difference over the former is (k-1)T / (k(R+T)).
    Without any GPU it is 0.
    """
    whole = runs * (rollout_gpus + trainer_gpus)
    return (runs - 1) * trainer_gpus / whole if whole else 0.0


def saving(slowdown: float, runs: int, rollout_gpus: float, trainer_gpus: float) -> float:
    """The part of GPU-hours that like runs save if their cycles take `slowdown` times as long; negative: a loss.

    1 - s (R + T/k) / (R + T), for each run holds its rollout GPUs and its part of the trainer for so much longer.
    """
    return 1.0 - slowdown * (rollout_gpus + trainer_gpus / runs) / (rollout_gpus + trainer_gpus)


def _factor(normal: float, cv: float) -> float:
    """A log-normal factor with mean 1 and this coefficient of variation, from a standard normal number."""
    variance = math.log1p(cv * cv)
    return math.exp(math.sqrt(variance) * normal - variance / 2)
