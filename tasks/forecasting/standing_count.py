"""How many slots a standing crew needs so that enough members are left when its execution ends.

Flyte counts a slot's lost machines over the whole execution, and does not start it again once they exceed the budget.
The simulator does not know this budget, because it simulates a small part of an execution.
"""

import math
from collections.abc import Sequence

from storage.forecast_records import StandingPool
from tasks.forecasting.availability import losses_per_h
from tasks.forecasting.scenario import PoolScenario

# Losses that a slot survives; with the next one it is gone for the rest of the execution (docs/guide/elastic.md).
LOSSES_SURVIVED = 3


def share_left(per_h: float, hours: float, losses_survived: int = LOSSES_SURVIVED) -> float:
    """The probability that a slot still exists after `hours`, if losses of its machine are Poisson.

    per_h: losses of one machine. Raises ValueError for values below 0 or not finite.
    """
    for name, value in (("per_h", per_h), ("hours", hours), ("losses_survived", losses_survived)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}: value {value}; allowed: at least 0, finite")
    expected = per_h * hours
    return math.exp(-expected) * math.fsum(expected**n / math.factorial(n) for n in range(losses_survived + 1))


def standing_count(members: int, per_h: float, hours: float) -> int | None:
    """The fewest slots of which `members` are expected to be left at the end; None if that takes twice as many or more.

    None means that the execution should be run in parts: the same command goes on where the run stands. Raises
    ValueError as `share_left` does, and for fewer than one member.
    """
    if members < 1:
        raise ValueError(f"members: value {members}; allowed: at least 1")
    left = share_left(per_h, hours)
    return math.ceil(members / left) if left > 0.5 else None


def standing_pools(pools: Sequence[PoolScenario], hours: float) -> tuple[StandingPool, ...]:
    """What the budget means for the pools of a standing crew that can lose machines, in one execution of `hours`."""
    found = []
    for pool in pools:
        per_h = losses_per_h(pool.availability)
        if per_h and pool.count:
            found.append(
                StandingPool(
                    pool=pool.name,
                    members=pool.count,
                    losses_per_h=per_h,
                    share_gone=1.0 - share_left(per_h, hours),
                    slots=standing_count(pool.count, per_h, hours),
                    part_h=1.0 / per_h,
                )
            )
    return tuple(found)
