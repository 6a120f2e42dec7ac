"""A global cut (RLHFuse, as RLHFless describes it): all members stop at once, and as few as possible decode the tail.

In production each member cuts by itself, so this baseline is computed here: members decode in lockstep with exactly the
scenario's step times and lengths, without starts or requests.
"""

import math

import numpy as np
import numpy.typing as npt

from tasks.forecasting.response_lengths import ResponseLengths
from tasks.forecasting.scenario import Scenario
from tasks.planning.division import assign_groups
from tasks.planning.makespan import member_time_s

Floats = npt.NDArray[np.float64]


def crew_gpu_s(given: Scenario, members: int, share: float, seed: int, iteration: int) -> float:
    """The crew's GPU-seconds, with groups dealt in turn and `share` of all responses ending before the cut.

    The remaining responses go, with their prefixes, to as few members as can decode them together. Raises ValueError
    when a member would have to let responses wait.
    """
    pool = given.pools[0]
    lengths = ResponseLengths(given.work, seed).lengths(iteration).astype(np.float64)
    dealt = [np.sort(lengths[list(groups)].ravel()) for groups in assign_groups(len(lengths), members)]
    most = max(map(len, dealt))
    if most > pool.responses_max:
        raise ValueError(f"responses_max: value {pool.responses_max}; allowed: at least {most}")
    table = pool.step_time.table(pool.responses_max)
    ends = [_ends_s(part, table) for part in dealt]
    cut_s = float(np.sort(np.concatenate(ends))[math.ceil(share * lengths.size) - 1])
    left: list[float] = []
    prefixes = 0.0
    for part, ends_s in zip(dealt, ends, strict=True):
        decoded = float(np.interp(cut_s, [0.0, *ends_s], [0.0, *part]))
        unfinished = part[ends_s > cut_s] - decoded
        left += unfinished.tolist()
        prefixes += decoded * len(unfinished)
    fewest = math.ceil(len(left) / pool.responses_max)
    parts = [sorted(left, reverse=True)[k::fewest] for k in range(fewest)]
    tail_s = sum(member_time_s(part, pool.step_time, pool.responses_max) for part in parts)
    return pool.gpus * (members * cut_s + tail_s + prefixes / pool.prefill_tokens_per_s)


def _ends_s(lengths: Floats, table: Floats) -> Floats:
    """The time at which each response ends if all are decoded together from the beginning; lengths ascend."""
    tokens = np.diff(lengths, prepend=0)
    ends: Floats = np.cumsum(tokens * table[len(lengths) : 0 : -1])
    return ends
