"""The arms of benchmarks.seeds: the papers' scenarios, the changes to them, and runs of all arms with all seeds.

A scenario file holds a paper's setting with the source of each value (scenarios/). An arm is such a scenario
with changes, and says which of its iterations count.
"""

import math
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.reporting import Measured, measured
from benchmarks.seeds.work_bound import WorkBound, work_bound
from storage.records.records import TRAIN_POOL
from tasks.crew_model.events import Stalled
from tasks.forecasting.results import SimulatedRun
from tasks.forecasting.scenario import AvailabilityScenario, Scenario, load
from tasks.forecasting.simulate import simulate

SCENARIOS = Path(__file__).parent / "scenarios"
# The uses of a machine's time while its member has work.
_BUSY = ("prefill", "useful", "wasted")


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """`after_s` seconds into the iteration only `left` machines remain, and all are back `back_s` seconds later."""

    iteration: int
    after_s: float
    left: int
    back_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Arm:
    """settle: iterations at the beginning that do not count. span_s: as in simulate. preemption: of the first pool.

    minor: whether the arm runs with the first seed only, unless all are requested.
    """

    scenario: Scenario
    minor: bool = False
    settle: int = 0
    span_s: float | None = None
    preemption: Preemption | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of one arm with one seed, as means per iteration that counts.

    duration_s, rollout_s, train_s, seeding_s, tokens, usd: per iteration. last_s: the duration of the last one alone.
    engine_s: the working time of members and the trainer's engines. members: the mean number with weights while
    responses were decoded. transfer_s: the time of weights to each planned member. crew_gpu_s: GPU-seconds of the
    pools' machines. trainer_gpu_s: GPU-seconds of the trainer's machines while they train. stalled: why the run could
    not go on; its duration is then infinite, and it has no tokens. bound_s: the least seconds of an iteration that GPUs
    as many as there were could have taken, and reached: that over the seconds that were taken, both over the whole run
    (benchmarks.seeds.work_bound).
    """

    iterations: int
    duration_s: float
    last_s: float
    rollout_s: float
    train_s: float
    seeding_s: float
    tokens: float
    regenerated: float
    usd: float
    engine_s: float
    members: float
    transfer_s: float
    crew_gpu_s: float
    trainer_gpu_s: float
    bound_s: float
    reached: float
    stalled: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s

    @property
    def tokens_per_usd(self) -> float:
        return self.tokens / self.usd

    @property
    def speed(self) -> float:
        """Iterations per second."""
        return 1 / self.duration_s

    @property
    def worth(self) -> float:
        """Throughput and tokens per dollar, weighed alike, as a cost_weight of 0.5 weighs them."""
        return math.sqrt(self.tokens_per_s * self.tokens_per_usd)

    @property
    def gpu_s(self) -> float:
        """The GPU-seconds that serverless functions would bill: the crew's, and the trainer's while they train."""
        return self.crew_gpu_s + self.trainer_gpu_s


class Outcomes:
    """Outcomes by arm and seed. Figures are medians over seeds; ratios are taken seed by seed, for common seeds."""

    def __init__(self, found: Mapping[str, Sequence[Outcome]]) -> None:
        self._found = found

    def of(self, arm: str) -> Sequence[Outcome]:
        """The outcomes of an arm, one per seed in order."""
        return self._found[arm]

    def names(self, prefix: str) -> Sequence[str]:
        """The arms with this prefix."""
        return [name for name in self._found if name.startswith(prefix)]

    def median(self, arm: str, figure: str) -> float:
        return statistics.median(_figure(outcome, figure) for outcome in self._found[arm])

    def ratio(self, figure: str, arm: str, other: str) -> float:
        """The figure of `arm` over that of `other`."""
        return self.ratios(figure, arm, other).median

    def ratios(self, figure: str, arm: str, other: str) -> Measured:
        """The same with an interval over seeds."""
        pairs = zip(self._found[arm], self._found[other], strict=False)
        return measured([_figure(a, figure) / _figure(b, figure) for a, b in pairs])

    def stalled(self, arm: str) -> str:
        """The number of stalled runs of the arm, with the first one's reason; empty if there are none."""
        reasons = [outcome.stalled for outcome in self._found[arm] if outcome.stalled]
        return f"{len(reasons)} of {len(self._found[arm])} stall ({reasons[0]})" if reasons else ""

    def best(self, figure: str, prefix: str, choose: Callable[..., str] = max) -> str:
        """The arm with the largest figure (or the one that `choose` picks) among those with this prefix."""
        return choose(self.names(prefix), key=lambda name: self.median(name, figure))

    def kept_share(self, arm: str, other: str, undisturbed: str) -> float:
        """The share of `other`'s prolongation of the last iteration that `arm` saves; 0 if neither is prolonged."""
        triples = zip(self._found[arm], self._found[other], self._found[undisturbed], strict=False)
        prolonged = [(a.last_s - u.last_s, b.last_s - u.last_s) for a, b, u in triples]
        return statistics.median(1 - ours / theirs if theirs else 0.0 for ours, theirs in prolonged)


def _figure(outcome: Outcome, name: str) -> float:
    return float(getattr(outcome, name))


def scenario(name: str) -> Scenario:
    """Read the scenario file of this name."""
    return load(SCENARIOS / f"{name}.yaml")


def with_policy(given: Scenario, *, planning: Mapping[str, Any] | None = None, **changed: Any) -> Scenario:
    settings = replace(given.policy.planning, **(planning or {}))
    return replace(given, policy=replace(given.policy, planning=settings, **changed))


def with_work(given: Scenario, *, lengths: Mapping[str, Any] | None = None, **changed: Any) -> Scenario:
    return replace(given, work=replace(given.work, lengths=replace(given.work.lengths, **(lengths or {})), **changed))


def with_pool(given: Scenario, **changed: Any) -> Scenario:
    """The scenario with its first pool changed, and no other pool."""
    return replace(given, pools=(replace(given.pools[0], **changed),))


def with_counts(given: Scenario, counts: Sequence[tuple[float, int]]) -> Scenario:
    """The scenario with these numbers of machines from these seconds on, all of which the planner may use."""
    available = AvailabilityScenario(counts=tuple(counts))
    changed = with_pool(given, count=max(count for _, count in counts), availability=available)
    return with_policy(changed, planning={"width": "fixed"})


def colocated(given: Scenario) -> Scenario:
    """The trainer's machines alone, one stage after the other: groups in turn, no balancing (veRL; HybridFlow)."""
    changed = with_policy(
        given, planning={"seeding": "auto", "dispatch": "in_turn"}, predictor="none", balance=False, streaming=False
    )
    return replace(changed, pools=())


def run_all(arms: Mapping[str, Arm], seeds: Sequence[int], workers: int, *, full: bool = False) -> Outcomes:
    """Run every arm with every seed, on `workers` processes; 0: in this one. full: minor arms with every seed too."""
    jobs = [(name, seed) for name, arm in arms.items() for seed in (seeds[:1] if arm.minor and not full else seeds)]
    if workers:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            done = list(pool.map(run, [arms[name] for name, _ in jobs], [seed for _, seed in jobs], chunksize=2))
    else:
        done = [run(arms[name], seed) for name, seed in jobs]
    found: dict[str, list[Outcome]] = {name: [] for name in arms}
    for (name, _), outcome in zip(jobs, done, strict=True):
        found[name].append(outcome)
    return Outcomes(found)


def run(arm: Arm, seed: int) -> Outcome:
    """Run one arm with one seed."""
    given = arm.scenario
    if arm.preemption is not None:
        given = _preempted(given, arm.preemption, seed)
    try:
        lived = simulate(given, seed=seed, span_s=arm.span_s)
    except Stalled as error:
        return _never_ended(str(error))
    if arm.settle >= len(lived.iterations):
        raise ValueError(f"{given.name}: {len(lived.iterations)} iterations; allowed: more than settle ({arm.settle})")
    counted = lived.last(len(lived.iterations) - arm.settle)
    return _outcome(given, counted, work_bound(given, lived, seed))


def _never_ended(reason: str) -> Outcome:
    figures = {field.name: math.inf for field in fields(Outcome)}
    return Outcome(**(figures | {"iterations": 0, "tokens": 0.0, "members": 0.0, "reached": 0.0, "stalled": reason}))  # type: ignore[arg-type]


def _preempted(given: Scenario, loss: Preemption, seed: int) -> Scenario:
    """The scenario with the pool's maximal machines until the loss; earlier iterations are the same without it."""
    whole = given.pools[0].count
    earlier = simulate(with_work(given, iterations=loss.iteration), seed=seed)
    at_s = earlier.duration_s + loss.after_s
    counts = [(0.0, whole), (at_s, loss.left)]
    return with_counts(given, counts if loss.back_s is None else [*counts, (at_s + loss.back_s, whole)])


def _outcome(given: Scenario, lived: SimulatedRun, bound: WorkBound) -> Outcome:
    each, count = lived.iterations, len(lived.iterations)
    engines = {pool.name: 1 for pool in given.pools} | {TRAIN_POOL: given.trainer.engines}
    busy_s = [
        sum(engines[pool] * sum(parts[part] for part in _BUSY) for pool, parts in iteration.seconds.items())
        for iteration in each
    ]
    crew_gpu_s = [sum(pool.gpus * sum(one.seconds[pool.name].values()) for pool in given.pools) for one in each]
    decoded_s = sum(one.rollout_s for one in each)
    asked = sum(one.planned.get(pool.name, 0) for one in each for pool in given.pools)
    transfer_s = sum(one.seconds[pool.name]["transfer"] for one in each for pool in given.pools)
    return Outcome(
        iterations=count,
        duration_s=lived.duration_s / count,
        last_s=each[-1].duration_s,
        rollout_s=decoded_s / count,
        train_s=sum(one.train_s for one in each) / count,
        seeding_s=sum(one.seeding_s for one in each) / count,
        tokens=lived.tokens / count,
        regenerated=lived.tokens_regenerated / count,
        usd=lived.usd / count,
        engine_s=sum(busy_s) / count,
        members=sum(one.rollout_s * sum(one.members.values()) for one in each) / decoded_s,
        transfer_s=transfer_s / max(1, asked),
        crew_gpu_s=sum(crew_gpu_s) / count,
        trainer_gpu_s=sum(one.seconds[TRAIN_POOL]["train"] for one in each) * given.trainer.gpus / count,
        bound_s=bound.least_s / bound.iterations,
        reached=bound.reached,
    )
