"""Staleness: how many weight versions lie between the policy that is trained and the one that sampled a token.

Pure functions of versions. Importance weights correct for staleness; this module only measures and bounds it.
"""

import numpy as np
import numpy.typing as npt

from storage.records import PlanRecord
from tasks.learning.totals import StepTotals


class TooStaleError(ValueError):
    """An iteration was sampled from older weights than the algorithm allows."""


def check_staleness(plan: PlanRecord, max_staleness: int) -> None:
    """Check that an iteration may be trained on: iteration n trains weight version n.

    Raises:
        TooStaleError: The plan's weight version is newer than that, or more than `max_staleness` older.
    """
    staleness = plan.iteration - plan.weight_version
    if not 0 <= staleness <= max_staleness:
        raise TooStaleError(
            f"iteration {plan.iteration}: it trains weight version {plan.iteration} on tokens of weight version "
            f"{plan.weight_version}; allowed with algorithm.max_staleness {max_staleness}: "
            f"{max(0, plan.iteration - max_staleness)} to {plan.iteration}"
        )


def staleness_totals(weight_versions: npt.NDArray[np.uint32], policy_version: int) -> StepTotals:
    """The staleness totals of tokens sampled from `weight_versions`, [n], when `policy_version` is trained."""
    staleness = policy_version - weight_versions.astype(np.int64)
    return StepTotals(staleness=int(staleness.sum()), staleness_max=int(staleness.max(initial=0)))
