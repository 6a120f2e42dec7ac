"""Corrects predictions by how far off those of the last iterations were, because such errors repeat.

One rule for a run and for its simulation: both bring what was expected of the last iterations, without any correction,
and what came.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.planning_records import DecisionRecord, SeedingRecord

# Names in a plan's decisions.
ITERATION, CORRECTION = "timing_s/iteration", "correction"
# How much an earlier iteration counts: one of the same crew, of another size, or with other pools or another seeding.
WEIGHT = {"same": 1.0, "size": 0.2, "kind": 0.02}
# How much of the error of the nearest of them is expected again.
TRUST = {"same": 0.9, "size": 0.8, "kind": 0.7}
# An iteration counts half as much as one this many iterations later.
HALF_LIFE = 4
FACTOR_MAX = 4.0

Width = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Realised:
    """A concluded iteration: its members by pool, and whether the trainer's machines generated, too.

    expected_s: its expected seconds before any correction; lasted_s: what it took.
    """

    width: Width
    seeded: bool
    expected_s: float
    lasted_s: float


def realised(
    decisions: Sequence[DecisionRecord], width: Width, seeding: SeedingRecord | None, lasted_s: float
) -> Realised | None:
    """What a concluded iteration says about predictions; None if nothing was predicted.

    decisions, width, seeding: of its plan. lasted_s: until the next plan could be made.
    """
    for decision in decisions:
        expected_s = decision.predicted.get(ITERATION)
        # Without the time of training nothing was predicted of the whole iteration.
        if expected_s is not None and "train_s" in decision.inputs:
            return Realised(
                width=width,
                seeded=is_seeded(seeding),
                expected_s=expected_s / decision.inputs.get(CORRECTION, 1.0),
                lasted_s=lasted_s,
            )
    return None


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
