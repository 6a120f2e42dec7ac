"""Claim: in a replay of arrivals, Isolated takes longer than Pack, Pack than Spread, and Spread than Spread + Backfill.

That is the order that PlexRL's summary gives, with 100, about 70, about 65 and 56.0 of Isolated's completion. Its trace
is not public, so arrivals are drawn here, and only the order is a target. Runs with one, two or four trainers arrive at
pools of one trainer each, a pool has two runs at most, and a run begins when it has all its pools:

- Isolated: a pool of its own each, first come, first served.
- Pack: first the pools that have a run already. Spread: first those with the least load.
- Backfill: a run that fits passes one that does not; with a patience, until that has waited for so long. That is
  production's rule of admission (`tasks/sharing/admission_queue.py`).

How much longer two runs on one pool take comes from production's simulator of shared trainers, by pairs. Several pools
for one run are the paper's; a host of ours trains a run alone. Nothing here was measured on a trainer.
"""

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from benchmarks.reporting import Target, finish
from storage.fleet_records import AdmittedRun
from tasks.sharing.admission_queue import may_not_pass
from tasks.sharing.shared_cycles import Conditions, share_trainer

POOLS = 16
ARRIVALS = 300
RUNS_ON_A_POOL_MAX = 2
LOAD_MAX = 0.9
TRAIN_SHARES = (0.2, 0.2, 0.3, 0.3, 0.45)
TRAINERS, TRAINERS_WEIGHTS = (1, 2, 4), (0.6, 0.25, 0.15)
HOURS_MEAN, HOURS_SIGMA = 14.4, 1.2
# Runs come in bursts of so many in the mean.
BURST = 4.0
BETWEEN_H = 1 / 3600
# Hours from one arrival to the next, in the mean: isolated runs wait now and then, much, and nearly always.
GAPS_H = (4.0, 2.2, 0.5)
CYCLE_S, SWITCH_S = 600.0, 20.0
ITERATIONS = 100
PATIENCE_H = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How pools are chosen. patience_h: how long a run that does not fit is passed; 0: first come, first served."""

    name: str
    runs_max: int
    packs: bool = False
    patience_h: float = 0.0


POLICIES = (
    Policy(name="Isolated", runs_max=1),
    Policy(name="Pack", runs_max=RUNS_ON_A_POOL_MAX, packs=True),
    Policy(name="Spread", runs_max=RUNS_ON_A_POOL_MAX),
    Policy(name="Spread + Backfill", runs_max=RUNS_ON_A_POOL_MAX, patience_h=math.inf),
    Policy(name=f"Spread + Backfill, patience {PATIENCE_H:g} h", runs_max=RUNS_ON_A_POOL_MAX, patience_h=PATIENCE_H),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """hours: how long the run takes alone. train_share: the part of a cycle in which its trainers compute."""

    at_h: float
    hours: float
    train_share: float
    trainers: int


@dataclass(slots=True)
class _Running:
    """A run that has its pools. left_h: how much of its hours alone is left."""

    arrival: Arrival
    number: int
    pools: tuple[int, ...]
    left_h: float


@dataclass(slots=True)
class Outcome:
    """began_h, ended_h: of each run, by its number."""

    arrivals: Sequence[Arrival]
    began_h: dict[int, float] = field(default_factory=dict)
    ended_h: dict[int, float] = field(default_factory=dict)

    @property
    def completion_h(self) -> float:
        """The mean time from a run's arrival to its end."""
        return statistics.fmean(self.ended_h[number] - each.at_h for number, each in enumerate(self.arrivals))

    @property
    def makespan_h(self) -> float:
        return max(self.ended_h.values())

    @property
    def wait_most_h(self) -> float:
        """The longest time for which a run waited for its pools."""
        return max(self.began_h[number] - each.at_h for number, each in enumerate(self.arrivals))

    @property
    def slowdown(self) -> float:
        return statistics.fmean(
            (self.ended_h[number] - self.began_h[number]) / each.hours for number, each in enumerate(self.arrivals)
        )


def draw(seed: int, gap_h: float) -> list[Arrival]:
    """Runs of unlike sizes in bursts: log-normal hours, exponential gaps between bursts."""
    rng = random.Random(seed)
    found, at_h = [], 0.0
    for _ in range(ARRIVALS):
        at_h += BETWEEN_H
        if rng.random() < 1 / BURST:
            at_h += rng.expovariate(1 / (gap_h * BURST))
        found.append(
            Arrival(
                at_h=at_h,
                hours=rng.lognormvariate(math.log(HOURS_MEAN) - HOURS_SIGMA**2 / 2, HOURS_SIGMA),
                train_share=rng.choice(TRAIN_SHARES),
                trainers=rng.choices(TRAINERS, TRAINERS_WEIGHTS)[0],
            )
        )
    return found


@cache
def slowdown(own: float, other: float | None) -> float:
    """How many times as long a run takes beside another one, by their train shares; None: it is alone."""
    if other is None:
        return 1.0
    runs = [
        AdmittedRun(
            id=str(number),
            run_url=f"memory://{number}",
            phase_s=share * CYCLE_S,
            cycle_s=CYCLE_S,
            state_bytes=0,
            admitted_at_s=0.0,
        )
        for number, share in enumerate((own, other))
    ]
    given = Conditions(switch_s=SWITCH_S)
    return statistics.fmean(
        share_trainer(runs, given, iterations=ITERATIONS, seed=seed).runs[0].slowdown for seed in range(4)
    )


class Replay:
    """The pools and the queue while runs arrive and end."""

    def __init__(self, arrivals: Sequence[Arrival], policy: Policy) -> None:
        self._arrivals = arrivals
        self._policy = policy
        self._on: list[list[_Running]] = [[] for _ in range(POOLS)]
        self._running: list[_Running] = []
        self._waiting: list[int] = []
        self._now_h = 0.0
        self.outcome = Outcome(arrivals)

    def run(self) -> Outcome:
        """Replay all arrivals until the last run has ended."""
        coming = list(range(len(self._arrivals)))
        while coming or self._running or self._waiting:
            ends = [(each.left_h * self._slowdown(each), each) for each in self._running]
            in_h, first = min(ends, key=lambda end: end[0], default=(math.inf, None))
            arrives_h = self._arrivals[coming[0]].at_h - self._now_h if coming else math.inf
            impatient_h = min(self._patience_ends(), default=math.inf)
            self._pass(min(in_h, arrives_h, impatient_h))
            if first is not None and in_h <= min(arrives_h, impatient_h):
                self._end(first)
            elif arrives_h <= impatient_h:
                self._waiting.append(coming.pop(0))
            self._admit()
        return self.outcome

    def _patience_ends(self) -> Iterator[float]:
        """In how many hours each waiting run's patience ends, if it has not."""
        for number in self._waiting:
            left_h = self._arrivals[number].at_h + self._policy.patience_h - self._now_h
            if left_h > 0:
                yield left_h

    def _pass(self, hours: float) -> None:
        for each in self._running:
            each.left_h -= hours / self._slowdown(each)
        self._now_h += hours

    def _end(self, ended: _Running) -> None:
        self.outcome.ended_h[ended.number] = self._now_h
        self._running.remove(ended)
        for pool in ended.pools:
            self._on[pool].remove(ended)

    def _slowdown(self, running: _Running) -> float:
        """Its trainers work in step, so the slowest pool decides."""
        others = (
            next((each.arrival.train_share for each in self._on[pool] if each is not running), None)
            for pool in running.pools
        )
        return max(slowdown(running.arrival.train_share, other) for other in others)

    def _admit(self) -> None:
        """Let all begin that fit and that may pass those before them, which came earlier."""
        for number in list(self._waiting):
            others_h = {str(each): self._now_h - self._arrivals[each].at_h for each in self._waiting}
            if may_not_pass(others_h.pop(str(number)), others_h, self._policy.patience_h) is None:
                pools = self._pools_for(self._arrivals[number])
                if pools is not None:
                    self._begin(number, pools)

    def _begin(self, number: int, pools: tuple[int, ...]) -> None:
        arrival = self._arrivals[number]
        run = _Running(arrival, number, pools, arrival.hours)
        self._waiting.remove(number)
        self._running.append(run)
        for pool in pools:
            self._on[pool].append(run)
        self.outcome.began_h[number] = self._now_h

    def _pools_for(self, arrival: Arrival) -> tuple[int, ...] | None:
        """The pools for a run, in the order of the policy; None: it does not fit."""
        able = [
            pool
            for pool, there in enumerate(self._on)
            if len(there) < self._policy.runs_max and self._load(pool) + arrival.train_share <= LOAD_MAX
        ]
        if self._policy.packs:
            able.sort(key=lambda pool: (-len(self._on[pool]), pool))
        else:
            able.sort(key=lambda pool: (self._load(pool), pool))
        return tuple(able[: arrival.trainers]) if len(able) >= arrival.trainers else None

    def _load(self, pool: int) -> float:
        return math.fsum(each.arrival.train_share for each in self._on[pool])


def replay(seed: int, gap_h: float) -> dict[str, Outcome]:
    """The same arrivals under each policy."""
    arrivals = draw(seed, gap_h)
    return {policy.name: Replay(arrivals, policy).run() for policy in POLICIES}


def report(found: dict[float, list[dict[str, Outcome]]], *, as_json: bool) -> None:
    """Print the table, the order as a target for each gap, and JSON."""
    rows: list[dict[str, Any]] = []
    targets = []
    for gap_h, outcomes in found.items():
        mean: dict[str, float] = {}
        isolated = [each[POLICIES[0].name] for each in outcomes]
        for policy in POLICIES:
            these = [each[policy.name] for each in outcomes]
            mean[policy.name] = statistics.fmean(
                a.completion_h / b.completion_h for a, b in zip(these, isolated, strict=True)
            )
            rows.append(
                {
                    "hours between arrivals": gap_h,
                    "policy": policy.name,
                    "completion over Isolated": mean[policy.name],
                    "makespan over Isolated": statistics.fmean(
                        a.makespan_h / b.makespan_h for a, b in zip(these, isolated, strict=True)
                    ),
                    "slowdown of a run": statistics.fmean(each.slowdown for each in these),
                    "longest wait, h": statistics.median(each.wait_most_h for each in these),
                }
            )
        published = [mean[policy.name] for policy in POLICIES[:4]]
        wrong = sum(later > sooner for sooner, later in itertools.pairwise(published))
        targets.append(Target(f"pairs_in_another_order_than_published_{gap_h:g}_h", float(wrong), "== 0"))
    notes = {"seeds": len(next(iter(found.values()))), "arrivals": ARRIVALS, "pools": POOLS, "switch_s": SWITCH_S}
    finish("sharing_replay", rows, targets, as_json=as_json, notes=notes)


def main() -> None:
    """Parse, replay, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds: value {options.seeds}; allowed: at least 1")
    found = {gap_h: [replay(seed, gap_h) for seed in range(options.seeds)] for gap_h in GAPS_H}
    report(found, as_json=options.json)


if __name__ == "__main__":
    main()
