"""Corrects outlines by how far off those of the last iterations are, because such errors repeat."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from storage.planning_records import SeedingRecord
from tasks.planning.offer import Concluded
from tasks.planning.outline import Outliner
from tasks.planning.request import PlanningRequest

# Names in a plan's decisions.
ITERATION, CORRECTION = "timing_s/iteration", "correction"
# How much an earlier iteration counts: one of the same crew, of another size, or with other pools or another seeding.
WEIGHT = {"same": 1.0, "size": 0.2, "kind": 0.02}
# How much of the error of the nearest of them is expected again.
TRUST = {"same": 0.9, "size": 0.8, "kind": 0.7}
# An iteration counts half as much as the one this many places later, of those that count.
HALF_LIFE = 4
FACTOR_MAX = 4.0

Width = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Realised:
    """A concluded iteration: its members by pool, and whether the trainer's machines generated, too.

    expected_s: its seconds as outlined in hindsight; lasted_s: what it took.
    """

    width: Width
    seeded: bool
    expected_s: float
    lasted_s: float


def errors(request: PlanningRequest) -> tuple[Realised, ...]:
    """The last iterations beside their outlines, the newest first.

    An outline in hindsight has the iteration's own lengths and training. So what is left is the outline's error, not
    the luck of the draw, which does not repeat. Iterations that found fewer machines than planned are left out, because
    it is not known when the others came.
    """
    settled = [seen for seen in request.past if request.measured and _found_its_machines(seen)]
    return tuple(_in_hindsight(request, seen) for seen in settled if _is_on_offer(request, seen))


def _is_on_offer(request: PlanningRequest, seen: Concluded) -> bool:
    """Whether all that generated in the iteration is still on offer; an outline of a part of it would be too slow."""
    members = {pool for pool, count in seen.width.items() if count}
    alone = request.reserved is not None and is_seeded(seen.seeding)
    return members <= {offer.pool for offer in request.offers} and (bool(members) or alone)


def _found_its_machines(seen: Concluded) -> bool:
    there = ((seen.there.get(pool), count) for pool, count in seen.width.items())
    return all(found is None or found >= count for found, count in there)


def _in_hindsight(request: PlanningRequest, seen: Concluded) -> Realised:
    offers = tuple(replace(one, there=None, available=None) for one in request.offers)
    then = replace(request, offers=offers, past=(seen,), train_s=seen.train_s)
    counts = tuple(seen.width.get(offer.pool, 0) for offer in offers)
    outline = Outliner(then).outline(counts, seen.seeding)
    return Realised(
        width=seen.width,
        seeded=is_seeded(seen.seeding),
        expected_s=outline.iteration_s,
        lasted_s=seen.lasted_s,
    )


def is_seeded(seeding: SeedingRecord | None) -> bool:
    """Whether the trainer's machines generate."""
    return seeding is not None and seeding.seeding_s != 0


def correction(past: Sequence[Realised], width: Width, *, seeded: bool) -> float:
    """How many times as long as expected an iteration with this crew lasts; past: the newest first.

    It is the weighted geometric mean of the ratios so far, as far as it is trusted; at most FACTOR_MAX either way.
    """
    weights = logarithms = trust = 0.0
    for age, seen in enumerate(past):
        if seen.expected_s > 0 and seen.lasted_s > 0:
            likeness = _likeness(seen, width, seeded=seeded)
            weight = WEIGHT[likeness] * 0.5 ** (age / HALF_LIFE)
            weights += weight
            logarithms += weight * math.log(seen.lasted_s / seen.expected_s)
            trust = max(trust, TRUST[likeness])
    error = trust * logarithms / weights if weights else 0.0
    return min(FACTOR_MAX, max(1 / FACTOR_MAX, math.exp(error)))


def _likeness(seen: Realised, width: Width, *, seeded: bool) -> str:
    pools = seen.width.keys() | width.keys()
    sizes = [(seen.width.get(pool, 0), width.get(pool, 0)) for pool in pools]
    if seen.seeded != seeded or any((was > 0) != (now > 0) for was, now in sizes):
        return "kind"
    return "same" if all(was == now for was, now in sizes) else "size"
