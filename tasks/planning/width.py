"""Width: chooses how many members of each pool generate an iteration.

RLHFless (arXiv 2602.22718, section 4.4) takes the argmin over N of lambda T~(N) + (1 - lambda) C~(N), both normalised,
each N scored with its own dispatch; cost_weight is 1 - lambda. Here N is a number for every pool, C is in dollars, with
cold starts and expected losses, and T lasts until training has ended, too (tasks/planning/crew.py). The paper
normalises by the least and the greatest value. If all candidates differ by only 1 % in time, that 1 % then weighs as
much as a difference of 100 % in dollars. Here both are logarithms, so that T^(1 - cost_weight) C^cost_weight is
minimised, and a cost_weight of 0.5 pays 1 % more for 1 % less time. RLBoost (arXiv 2510.19225, Algorithm 1, line 10)
bounds N by N_prem, rollout work over training time: more members would only wait.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NoReturn

import numpy as np

from tasks.planning.crew import Crew, measured_work_s, members_rate, planned_crew, slowest_rate, step_time
from tasks.planning.outline import Outline, outline
from tasks.planning.request import BudgetExceeded, PlanningRequest
from tasks.planning.seeding import members_needed
from tasks.planning.stage_balance import BalanceStep, balance_step

# Widths that are outlined before the search continues from the best of them, and the most that are outlined in all.
OUTLINES, OUTLINES_MAX = 64, 128
# Widths to which groups are dealt: all if there are few groups, two for 128, so that planning these takes some 30 ms.
CREWS_MIN, CREWS_MAX, GROUPS_DEALT = 2, 64, 256
FREE_USD = 1e-9
Counts = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WidthChoice:
    """The chosen width.

    crew: the chosen crew; reason: in a plain sentence. considered: crews with their scores; 1 is the best score, and
    more is worse. members_cap: N_prem, if it is known and width is "cost". step: the decision of width "balance", if it
    was taken.
    """

    crew: Crew
    reason: str
    considered: tuple[tuple[Crew, float], ...] = ()
    members_cap: int | None = None
    step: BalanceStep | None = None


def choose_width(request: PlanningRequest) -> WidthChoice:
    """The crew of the next iteration, its groups dealt.

    Without measured step times neither seconds nor dollars can be predicted: each pool then gives `count_max`, and no
    budget is checked. Raises BudgetExceeded if every allowed width is expected to cost too much.
    """
    settings = request.settings
    widest = tuple(offer.count_max for offer in request.offers)
    if not sum(widest):
        choice = WidthChoice(crew=planned_crew(request, widest), reason="no pool has a machine")
    elif not request.measured:
        reason = "every member on offer: no step time is measured yet, so seconds and dollars cannot be predicted"
        return WidthChoice(crew=planned_crew(request, widest), reason=reason)
    elif settings.width == "fixed":
        choice = WidthChoice(crew=planned_crew(request, widest), reason="every member on offer, as width: fixed says")
    elif settings.width == "balance":
        choice = _balanced(request, widest)
    else:
        return _weighed(request, settings.cost_weight, _members_cap(request))
    if not request.measured or choice.crew.usd_iteration <= allowed_usd(request)[1]:
        return choice
    narrower = _weighed(request, 0.0, None)
    reason = f"the quickest that the budget allows; {describe(request, choice.crew.counts)} would exceed it"
    return WidthChoice(crew=narrower.crew, reason=reason, considered=((choice.crew, math.inf), *narrower.considered))


def allowed_usd(request: PlanningRequest) -> tuple[str, float]:
    """The binding budget setting, and what it allows the iteration to cost; infinite without a budget."""
    settings = request.settings
    limits = [("usd_per_iteration_max", math.inf)]
    if settings.usd_per_iteration_max is not None:
        limits.append(("usd_per_iteration_max", settings.usd_per_iteration_max))
    if settings.usd_per_run_max is not None:
        limits.append(("usd_per_run_max", settings.usd_per_run_max - request.spent_usd))
    return min(limits, key=lambda limit: limit[1])


def describe(request: PlanningRequest, counts: Counts) -> str:
    """A width in words: "rollout 4, spot 2"."""
    named = [f"{offer.pool} {count}" for offer, count in zip(request.offers, counts, strict=True)]
    return ", ".join(named) or "none"


def _members_cap(request: PlanningRequest) -> int | None:
    """N_prem, rounded up, in members of the slowest pool; None if the work or the training time is unknown."""
    work_s, slowest = measured_work_s(request), slowest_rate(request)
    if not work_s or not request.training_s or not slowest:
        return None
    return max(1, math.ceil(members_needed(work_s, request.training_s) * members_rate(request) / slowest))


def _bounds(request: PlanningRequest, cap: int | None) -> tuple[Counts, Counts, int]:
    """The fewest and the most members of each pool, and the most in all."""
    low = tuple(min(offer.count_min, offer.count_max) for offer in request.offers)
    high = tuple(offer.count_max for offer in request.offers)
    most = sum(high) if cap is None else max(cap, sum(low))
    return low, tuple(min(h, most - sum(low) + least) for h, least in zip(high, low, strict=True)), most


def _fewest(request: PlanningRequest) -> int:
    """The fewest members allowed: 0 if the trainer's machines may generate all or no pool has a machine, else 1."""
    alone = request.reserved is not None and request.settings.seeding == "auto"
    return 0 if alone or not sum(offer.count_max for offer in request.offers) else 1


def _weighed(request: PlanningRequest, cost_weight: float, cap: int | None) -> WidthChoice:
    """Outline many widths, deal the groups to the best of them, and take the best affordable one of these."""
    low, high, most = _bounds(request, cap)
    looked_at = [counts for counts in _ladder(low, high) if _fewest(request) <= sum(counts) <= most]
    dealt_max = min(CREWS_MAX, max(CREWS_MIN, GROUPS_DEALT // len(request.lengths)))
    allowed, rank = allowed_usd(request)[1], partial(_rank, cost_weight)
    crews: list[Crew] = []
    if len(looked_at) <= dealt_max and _is_whole(low, high):
        crews = [planned_crew(request, counts) for counts in looked_at]
    else:
        outlines = _outlined(request, looked_at, cost_weight, most)
        outlines = _diverse(sorted(outlines, key=lambda one: (one.usd_iteration > allowed, rank(one))), low)
        crews = [planned_crew(request, one.counts) for one in outlines[:dealt_max]]
        rest = sorted(outlines[dealt_max:], key=lambda one: (one.usd_iteration, one.counts))[:CREWS_MAX]
        while rest and all(crew.usd_iteration > allowed for crew in crews):
            crews.append(planned_crew(request, rest.pop(0).counts))
    crews.sort(key=rank)
    affordable = [crew for crew in crews if crew.usd_iteration <= allowed]
    if not affordable:
        _refuse(request, crews)
    reason = f"the best for a weight of {cost_weight:g} of dollars against time"
    if len(affordable) < len(crews):
        reason += " within the budget"
    if cap is not None and cap < sum(offer.count_max for offer in request.offers):
        reason += f"; more than {cap} members would only wait for training"
    chosen = min(affordable[0], _without_idle(request, affordable[0]), key=rank)
    compared = crews if chosen is affordable[0] else [chosen, *crews]
    least = min(_score(cost_weight, crew) for crew in compared)
    considered = tuple((crew, _score(cost_weight, crew) / least) for crew in compared)
    return WidthChoice(crew=chosen, reason=reason, considered=considered, members_cap=cap)


def _without_idle(request: PlanningRequest, crew: Crew) -> Crew:
    """The crew without members that would get no groups, as far as the minimum counts allow."""
    low, _, _ = _bounds(request, None)
    working = Counter(m.pool for m, a in zip(crew.members, crew.assignments, strict=True) if a.groups)
    counts = tuple(max(least, working[offer.pool]) for offer, least in zip(request.offers, low, strict=True))
    return crew if counts == crew.counts else planned_crew(request, counts)


def _outlined(request: PlanningRequest, looked_at: Iterable[Counts], cost_weight: float, most: int) -> list[Outline]:
    """Outlines of these widths, and of others met in a search for a better one that begins at the best of them."""
    low, high, _ = _bounds(request, most)
    lengths = np.sort(request.responses, axis=None)[::-1]
    found = {counts: outline(request, counts, lengths) for counts in looked_at}
    allowed = allowed_usd(request)[1]

    def rank(one: Outline) -> tuple[bool, tuple[float, float, int, Counts]]:
        return one.usd_iteration > allowed, _rank(cost_weight, one)

    best = min(found.values(), key=rank)
    step = max(1, max(h - least for h, least in zip(high, low, strict=True)) // 4)
    while step and len(found) < OUTLINES_MAX:
        for counts in _neighbours(best.counts, step, low, high):
            if counts not in found and _fewest(request) <= sum(counts) <= most:
                found[counts] = outline(request, counts, lengths)
        better = min(found.values(), key=rank)
        step = step if better is not best else step // 2
        best = better
    return list(found.values())


def _diverse(outlines: Sequence[Outline], low: Counts) -> list[Outline]:
    """The best outline for each set of pools in use, then the best of each size, then the rest.

    Outlines of similar crews err similarly, so the best few alone might all make the same mistake.
    """
    seen: set[Counts] = set()
    ordered: list[tuple[int, int, Outline]] = []
    for place, one in enumerate(outlines):
        more = [count - least for count, least in zip(one.counts, low, strict=True)]
        pools, sizes = tuple(min(m, 1) for m in more), tuple(2 + m.bit_length() for m in more)
        ordered.append((0 if pools not in seen else 1 if sizes not in seen else 2, place, one))
        seen |= {pools, sizes}
    return [one for *_, one in sorted(ordered, key=lambda entry: entry[:2])]


def _neighbours(counts: Counts, step: int, low: Counts, high: Counts) -> Iterable[Counts]:
    """One pool with `step` more or fewer members, or `step` members exchanged between two pools."""
    pools = range(len(counts))
    moves = [{pool: change} for pool in pools for change in (-step, step)]
    moves += [{to: step, of: -step} for to in pools for of in pools if to != of]
    for move in moves:
        moved = (max(low[p], min(high[p], counts[p] + move.get(p, 0))) for p in pools)
        yield tuple(moved)


def _ladder(low: Counts, high: Counts) -> list[Counts]:
    """All widths between the bounds, or about OUTLINES of them in roughly equal ratios, including both bounds.

    If there are too many pools for that, these are the bounds, and for each pool its maximum with the others' minimum.
    """
    pools = range(len(low))
    if 2 ** len(low) > OUTLINES:
        alone = (tuple(high[p] if p == most else low[p] for p in pools) for most in pools)
        return sorted({low, *alone, high})
    rungs = int(OUTLINES ** (1 / max(1, len(low))) + 1e-9)
    return list(product(*(_rungs(low[p], high[p], rungs) for p in pools)))


def _rungs(least: int, most: int, rungs: int) -> list[int]:
    if most - least < rungs:
        return list(range(least, most + 1))
    return sorted({round(rung) - 1 for rung in np.geomspace(least + 1, most + 1, rungs)})


def _score(cost_weight: float, one: Crew | Outline) -> float:
    """Seconds ** (1 - cost_weight) x dollars ** cost_weight; a free crew counts as almost free."""
    return float(one.iteration_s ** (1 - cost_weight) * max(one.usd_iteration, FREE_USD) ** cost_weight)


def _rank(cost_weight: float, one: Crew | Outline) -> tuple[float, float, int, Counts]:
    """The key to minimise; of equal scores the cheaper crew wins, then the smaller."""
    return _score(cost_weight, one), one.usd_iteration, sum(one.counts), one.counts


def _is_whole(low: Counts, high: Counts) -> bool:
    """Whether `_ladder` leaves no width out."""
    return len(_ladder(low, high)) == math.prod(h - least + 1 for h, least in zip(high, low, strict=True))


def _balanced(request: PlanningRequest, widest: Counts) -> WidthChoice:
    """The width of the last iteration, or one member more or fewer (tasks/planning/stage_balance.py).

    Generation and training times are measured; the ratio of two dealings gives what a member saves. An added member
    comes from the pool that decodes the most tokens per dollar, and a removed one leaves the pool that decodes the
    fewest.
    """
    low, high, _ = _bounds(request, None)
    before = dict(request.width)
    if not any(offer.pool in before for offer in request.offers):
        return WidthChoice(crew=planned_crew(request, widest), reason="every member on offer, to begin with")
    counts = tuple(
        max(least, min(most, before.get(offer.pool, least)))
        for offer, least, most in zip(request.offers, low, high, strict=True)
    )
    if sum(counts) < _fewest(request):
        counts = _changed(request, counts, 1, high) or counts
    crew = planned_crew(request, counts)
    if request.waits is None or not request.training_s or not request.waits.rollout_s:
        return WidthChoice(crew=crew, reason="as before: how long generating and training took is not known")
    crews: dict[int, Crew] = {}
    measured_s = request.waits.rollout_s
    # No member is added while generating is shorter, or removed while it is longer, so only one change must be dealt.
    change, bounds = (1, high) if measured_s >= request.training_s else (-1, low)
    changed = _changed(request, counts, change, bounds)
    if changed is not None and sum(changed) >= _fewest(request):
        crews[change] = planned_crew(request, changed)
    expected_s = {change: measured_s * other.rollout_s / crew.rollout_s for change, other in crews.items()}
    one_more_s, one_less_s = expected_s.get(1), expected_s.get(-1)
    step = balance_step(measured_s, request.training_s, one_more_s=one_more_s, one_less_s=one_less_s)
    reason = {
        1: "one more: generating takes longer than training by at least what a member saves",
        0: "as before: generating takes about as long as training",
        -1: "one fewer: generating would still take no longer than training",
    }[step.change]
    crews[0] = crew
    considered = tuple((crews[change], float(change != step.change)) for change in sorted(crews))
    return WidthChoice(crew=crews[step.change], reason=reason, considered=considered, step=step)


def _changed(request: PlanningRequest, counts: Counts, change: int, bounds: Counts) -> Counts | None:
    """The counts with one member more or fewer, if the bounds allow it."""
    offers = request.offers
    free = [pool for pool in range(len(counts)) if counts[pool] != bounds[pool]]
    if not free:
        return None
    usd_per_token = [offer.usd_per_h / step_time(request, offer).tokens_per_s(offer.responses_max) for offer in offers]
    chosen = min(free, key=lambda pool: (change * usd_per_token[pool], change * pool))
    return tuple(count + change * (pool == chosen) for pool, count in enumerate(counts))


def _refuse(request: PlanningRequest, crews: Sequence[Crew]) -> NoReturn:
    name, _ = allowed_usd(request)
    least = min(crews, key=lambda crew: (crew.usd_iteration, crew.counts))
    spent_usd = request.spent_usd if name == "usd_per_run_max" else 0.0
    spent = f"{spent_usd:.6g} of it spent, " if spent_usd else ""
    raise BudgetExceeded(
        f"{name}: {getattr(request.settings, name):.6g} given, {spent}and an iteration takes at least "
        f"{least.usd_iteration:.6g} ({describe(request, least.counts)}); "
        f"allowed: at least {spent_usd + least.usd_iteration:.6g}"
    )
