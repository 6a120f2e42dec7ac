"""Width: chooses how many members of each pool generate an iteration.

RLHFless (arXiv 2602.22718, section 4.4) takes the argmin over N of lambda T~(N) + (1 - lambda) C~(N), both normalised;
cost_weight is 1 - lambda. Here N is a number for every pool, C is in dollars and T lasts until the next plan
(tasks/planning/estimate.py estimates C and T). The paper normalises by the least and the greatest value. If all
candidates differ by only 1 % in time, 1 % of time then weighs as much as a difference of 100 % in dollars. Here C and T
are logarithms: T^(1 - cost_weight) C^cost_weight is minimised, and a cost_weight of 0.5 pays 1 % more for 1 % less
time.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NoReturn

import numpy as np

from tasks.planning.estimate import Estimate, Estimator
from tasks.planning.planned_crew import PlannedCrew, planned_crew, seedings, step_time
from tasks.planning.request import BudgetExceeded, PlanningRequest
from tasks.planning.stage_balance import BalanceStep, balance_step

# Widths that are estimated before the search continues from the best of them, and the most that are estimated in all.
LADDER, WIDTHS_MAX = 9, 16
# The crew of the newest plan, if that knew how an iteration went, stays unless another's score is better by this share.
CLEARLY = 0.05
FREE_USD = 1e-9
Counts = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WidthChoice:
    """The chosen width.

    Attributes:
        crew: the chosen crew, with groups assigned.
        estimate: expected seconds and dollars of the crew.
        reason: the reason in a plain sentence.
        considered: estimates of the considered widths with scores; 1 is the best score, and a higher score is worse.
        ways: estimates of the chosen width, one for each considered seeding.
        step: the decision of width "balance"; None with the two other kinds of width.
    """

    crew: PlannedCrew
    estimate: Estimate
    reason: str
    considered: tuple[tuple[Estimate, float], ...] = ()
    ways: tuple[Estimate, ...] = ()
    step: BalanceStep | None = None


def choose_width(request: PlanningRequest) -> WidthChoice:
    """The crew of the next iteration, with groups assigned to the members.

    Without measured step times neither seconds nor dollars can be predicted, so each pool gives `count_max` members and
    no budget is checked. Raises BudgetExceeded if every allowed width is expected to cost too much.
    """
    settings, search = request.settings, _Search(request)
    widest = tuple(pool.count_max for pool in request.pools)
    if not sum(widest):
        choice = search.choice(search.best(widest), "no pool has a machine")
    elif not request.measured:
        reason = "every member on offer: no step time is measured yet, so seconds and dollars cannot be predicted"
        return search.choice(search.best(widest), reason)
    elif settings.width == "fixed":
        choice = search.choice(search.best(widest), "every member on offer, as width: fixed says")
    elif settings.width == "balance":
        choice = _balanced(request, search, widest)
    else:
        return search.weighed(settings.cost_weight)
    if not request.measured or choice.estimate.usd_iteration <= allowed_usd(request)[1]:
        return choice
    narrower = search.weighed(0.0)
    reason = f"the quickest that the budget allows; {describe(request, choice.crew.counts)} would exceed it"
    return replace(narrower, reason=reason, considered=((choice.estimate, math.inf), *narrower.considered))


def allowed_usd(request: PlanningRequest) -> tuple[str, float]:
    """(name of the binding budget setting, dollars that the budget allows for the iteration: infinite without one)."""
    settings = request.settings
    limits = [("usd_per_iteration_max", math.inf)]
    if settings.usd_per_iteration_max is not None:
        limits.append(("usd_per_iteration_max", settings.usd_per_iteration_max))
    if settings.usd_per_run_max is not None:
        limits.append(("usd_per_run_max", settings.usd_per_run_max - request.spent_usd))
    return min(limits, key=lambda limit: limit[1])


def describe(request: PlanningRequest, counts: Counts) -> str:
    """A width in words: "rollout 4, spot 2"."""
    named = [f"{pool.name} {count}" for pool, count in zip(request.pools, counts, strict=True)]
    return ", ".join(named) or "none"


def _bounds(request: PlanningRequest) -> tuple[Counts, Counts]:
    """The fewest and the most members of each pool."""
    low = tuple(min(pool.count_min, pool.count_max) for pool in request.pools)
    return low, tuple(pool.count_max for pool in request.pools)


def _fewest(request: PlanningRequest) -> int:
    """The fewest members allowed: 0 if the trainer's machines may generate all or no pool has a machine, else 1."""
    alone = request.reserved is not None and request.settings.seeding == "auto"
    return 0 if alone or not sum(pool.count_max for pool in request.pools) else 1


def _estimates(request: PlanningRequest) -> int:
    """The most estimates that a choice can need: each width with each way of seeding."""
    low, high = _bounds(request)
    widths = math.prod(h - least + 1 for least, h in zip(low, high, strict=True))
    if request.settings.width != "cost" and math.isinf(allowed_usd(request)[1]):
        widths = 1 if request.settings.width == "fixed" else 2
    return min(WIDTHS_MAX, widths) * max(len(seedings(request, counts)) for counts in (low, high))


class _Search:
    """Estimates of crews with the best seeding of each, computed once for each width."""

    def __init__(self, request: PlanningRequest) -> None:
        self._request = request
        self._estimator = Estimator(request, _estimates(request))
        self._found: dict[Counts, tuple[Estimate, ...]] = {}

    def best(self, counts: Counts, cost_weight: float = 0.0) -> Estimate:
        """The estimate of `counts` members with the seeding of the best score."""
        if counts not in self._found:
            ways = (self._estimator.estimate(counts, seeding) for seeding in seedings(self._request, counts))
            self._found[counts] = tuple(ways)
        return min(self._found[counts], key=partial(_rank, cost_weight))

    def choice(self, estimate: Estimate, reason: str) -> WidthChoice:
        """The choice of the estimate's members, with the seeding of the shortest next iteration."""
        ways = self._found[estimate.counts]
        now = min(ways, key=lambda one: (one.iteration_s, one.usd_iteration))
        crew = planned_crew(self._request, now.counts, now.seeding)
        return WidthChoice(crew=crew, estimate=now, reason=reason, ways=ways)

    def weighed(self, cost_weight: float) -> WidthChoice:
        """Estimate several widths and take the best affordable width, or the newest plan's width if about as good."""
        request, allowed = self._request, allowed_usd(self._request)[1]
        low, high = _bounds(request)
        looked_at = [counts for counts in _ladder(low, high) if _fewest(request) <= sum(counts)]
        before = tuple(dict(request.planned_width or ()).get(pool.name, 0) for pool in request.pools)
        within = all(least <= b <= h for least, b, h in zip(low, before, high, strict=True))
        # The crews of the first plans were chosen before anything was known.
        informed = request.planned_width is not None and len(request.past_lengths) > 1
        is_kept = informed and within and _fewest(request) <= sum(before)
        if is_kept and before not in looked_at:
            looked_at.append(before)
        estimates = sorted(self._estimated(looked_at, cost_weight), key=partial(_rank, cost_weight))
        affordable = [one for one in estimates if one.usd_iteration <= allowed]
        if not affordable:
            _refuse(request, estimates)
        reason = f"the best for a weight of {cost_weight:g} of dollars against time"
        if len(affordable) < len(estimates):
            reason += " within the budget"
        chosen = affordable[0]
        kept = next((one for one in affordable if is_kept and one.counts == before != chosen.counts), None)
        if kept and _score(cost_weight, kept) * (1 - CLEARLY) <= _score(cost_weight, chosen):
            chosen, reason = kept, "as before; no other is clearly better"
        least = min(_score(cost_weight, one) for one in estimates)
        considered = tuple((one, _score(cost_weight, one) / least) for one in estimates)
        choice = self.choice(chosen, reason)
        shown = tuple((choice.estimate if one is chosen else one, score) for one, score in considered)
        return replace(choice, considered=shown)

    def _estimated(self, looked_at: Iterable[Counts], cost_weight: float) -> list[Estimate]:
        """Estimates of the given widths and of the neighbours met in a search from the best given width."""
        request = self._request
        low, high = _bounds(request)
        found = {counts: self.best(counts, cost_weight) for counts in looked_at}
        allowed = allowed_usd(request)[1]

        def rank(one: Estimate) -> tuple[bool, tuple[float, float, int, Counts]]:
            return one.usd_iteration > allowed, _rank(cost_weight, one)

        best = min(found.values(), key=rank)
        step = max(1, max((h - least for h, least in zip(high, low, strict=True)), default=0) // 4)
        while step and len(found) < WIDTHS_MAX:
            for counts in _neighbours(best.counts, step, low, high):
                if counts not in found and _fewest(request) <= sum(counts) and len(found) < WIDTHS_MAX:
                    found[counts] = self.best(counts, cost_weight)
            better = min(found.values(), key=rank)
            step = step if better is not best else step // 2
            best = better
        return list(found.values())


def _neighbours(counts: Counts, step: int, low: Counts, high: Counts) -> Iterable[Counts]:
    """One pool with `step` more or fewer members, or `step` members exchanged between two pools."""
    pools = range(len(counts))
    moves = [{pool: change} for pool in pools for change in (-step, step)]
    moves += [{to: step, of: -step} for to in pools for of in pools if to != of]
    for move in moves:
        moved = (max(low[p], min(high[p], counts[p] + move.get(p, 0))) for p in pools)
        yield tuple(moved)


def _ladder(low: Counts, high: Counts) -> list[Counts]:
    """Widths between the bounds: all if at most WIDTHS_MAX, else about LADDER widths in roughly equal ratios.

    Both bounds are included. With too many pools for a ladder, the widths are the bounds, and for each pool its maximum
    with the minimum of every further pool.
    """
    pools = range(len(low))
    if math.prod(h - least + 1 for least, h in zip(low, high, strict=True)) <= WIDTHS_MAX:
        return list(product(*(range(least, h + 1) for least, h in zip(low, high, strict=True))))
    if 2 ** len(low) > LADDER:
        alone = (tuple(high[p] if p == most else low[p] for p in pools) for most in pools)
        return sorted({low, *alone, high})
    rungs = int(LADDER ** (1 / max(1, len(low))) + 1e-9)
    return list(product(*(_rungs(low[p], high[p], rungs) for p in pools)))


def _rungs(least: int, most: int, rungs: int) -> list[int]:
    if most - least < rungs:
        return list(range(least, most + 1))
    return sorted({round(rung) - 1 for rung in np.geomspace(least + 1, most + 1, rungs)})


def _score(cost_weight: float, one: Estimate) -> float:
    """Seconds ** (1 - cost_weight) x dollars ** cost_weight; a free crew counts as almost free."""
    return float(one.lasting_s ** (1 - cost_weight) * max(one.lasting_usd, FREE_USD) ** cost_weight)


def _rank(cost_weight: float, one: Estimate) -> tuple[float, float, int, Counts]:
    """The key to minimise; of equal scores the cheaper crew wins, then the smaller."""
    return _score(cost_weight, one), one.lasting_usd, sum(one.counts), one.counts


def _balanced(request: PlanningRequest, search: _Search, widest: Counts) -> WidthChoice:
    """The width of the last iteration, or one member more or fewer (tasks/planning/stage_balance.py).

    Generation and training times are measured, and the ratio of two estimates gives the time that a member saves. An
    added member comes from the pool with the most tokens per dollar, and a removed member leaves the pool with the
    fewest tokens per dollar.
    """
    low, high = _bounds(request)
    before = dict(request.width)
    if not any(pool.name in before for pool in request.pools):
        return search.choice(search.best(widest), "every member on offer, to begin with")
    counts = tuple(
        max(least, min(most, before.get(pool.name, least)))
        for pool, least, most in zip(request.pools, low, high, strict=True)
    )
    if sum(counts) < _fewest(request):
        counts = _changed(request, counts, 1, high) or counts
    estimates = {0: search.best(counts)}
    if request.waits is None or not request.training_s or not request.waits.rollout_s:
        return search.choice(estimates[0], "as before: how long generating and training took is not known")
    measured_s = request.waits.rollout_s
    # No member is added while generating is shorter, or removed while it is longer, so only one change is possible.
    change, bounds = (1, high) if measured_s >= request.training_s else (-1, low)
    changed = _changed(request, counts, change, bounds)
    if changed is not None and sum(changed) >= _fewest(request):
        estimates[change] = search.best(changed)
    expected_s = {change: measured_s * one.rollout_s / estimates[0].rollout_s for change, one in estimates.items()}
    one_more_s, one_less_s = expected_s.get(1), expected_s.get(-1)
    step = balance_step(measured_s, request.training_s, one_more_s=one_more_s, one_less_s=one_less_s)
    reason = {
        1: "one more: generating takes longer than training by at least what a member saves",
        0: "as before: generating takes about as long as training",
        -1: "one fewer: generating would still take no longer than training",
    }[step.change]
    considered = tuple((estimates[change], float(change != step.change)) for change in sorted(estimates))
    return replace(search.choice(estimates[step.change], reason), considered=considered, step=step)


def _changed(request: PlanningRequest, counts: Counts, change: int, bounds: Counts) -> Counts | None:
    """The counts with one member more or fewer; None if the bounds forbid a change."""
    pools = request.pools
    free = [pool for pool in range(len(counts)) if counts[pool] != bounds[pool]]
    if not free:
        return None
    usd_per_token = [pool.usd_per_h / step_time(request, pool).tokens_per_s(pool.responses_max) for pool in pools]
    chosen = min(free, key=lambda pool: (change * usd_per_token[pool], change * pool))
    return tuple(count + change * (pool == chosen) for pool, count in enumerate(counts))


def _refuse(request: PlanningRequest, estimates: Sequence[Estimate]) -> NoReturn:
    name, _ = allowed_usd(request)
    least = min(estimates, key=lambda one: (one.usd_iteration, one.counts))
    spent_usd = request.spent_usd if name == "usd_per_run_max" else 0.0
    spent = f"{spent_usd:.6g} of it spent, " if spent_usd else ""
    raise BudgetExceeded(
        f"{name}: {getattr(request.settings, name):.6g} given, {spent}and an iteration takes at least "
        f"{least.usd_iteration:.6g} ({describe(request, least.counts)}); "
        f"allowed: at least {spent_usd + least.usd_iteration:.6g}"
    )
