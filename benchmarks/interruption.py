"""The responses on which a trainer trains when workers are lost: five policies as functions of durations and losses.

This models policies, not systems: a worker decodes its responses in parallel from time 0, a loss strikes all unfinished
ones, and a successor continues after a cold start. All times have the same, arbitrary unit.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Policy = Literal["drop response", "drop group", "restart, sampled anew", "restart, same tokens", "resume"]
"""The treatment of a response whose worker is lost before the response ends.

drop response: it is not trained on; its group is trained on the others.
drop group: no response of its group is trained on.
restart, sampled anew: it begins again from the prompt with new noise, as often as needed; another response comes out.
restart, same tokens: it begins again from the prompt with its own noise; the same response comes out, later.
resume: it goes on from its last journalled token; the same response comes out.
Under every policy, a response that has not ended by the deadline is not trained on.
"""
POLICIES: tuple[Policy, ...] = get_args(Policy)
_DROPPED = -1


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """The times that a loss costs, and how long the trainer waits (infinity: for all responses)."""

    cold_start: float
    takeover: float
    flush_interval: float
    deadline: float = math.inf


def trained_on(
    policy: Policy,
    durations: npt.NDArray[np.float64],
    groups: Sequence[int],
    losses: Sequence[Sequence[float]],
    given: Circumstances,
) -> npt.NDArray[np.int64]:
    """The sample of each response that is trained on.

    Args:
        policy: see Policy.
        durations: [n, k] decoding times; column 0 is the response, and further columns are new samples in turn (after
            the last comes the first).
        groups: [n] the group of each response; group g is on worker g mod len(losses).
        losses: for each worker, the ascending times at which it is lost.
        given: cold start, flush interval, deadline.

    Returns:
        [n] the column, or -1 for a response that is not trained on.
    """
    columns = [
        _column(policy, times, losses[group % len(losses)], given)
        for times, group in zip(durations.tolist(), groups, strict=True)
    ]
    if policy == "drop group":
        broken = {group for column, group in zip(columns, groups, strict=True) if column == _DROPPED}
        columns = [_DROPPED if group in broken else column for column, group in zip(columns, groups, strict=True)]
    return np.array(columns, dtype=np.int64)


def _column(policy: Policy, durations: Sequence[float], losses: Sequence[float], given: Circumstances) -> int:
    now, done, attempt = 0.0, 0.0, 0
    while now <= given.deadline:
        column = attempt % len(durations) if policy == "restart, sampled anew" else 0
        left = durations[column] - done
        place = bisect_right(losses, now)
        lost = losses[place] if place < len(losses) else math.inf
        if now + left <= lost:
            return column if now + left <= given.deadline else _DROPPED
        if policy in ("drop response", "drop group"):
            return _DROPPED
        now_decoded = lost - now
        now = lost + given.cold_start
        attempt += 1
        if policy == "resume":
            done += now_decoded - now_decoded % given.flush_interval
            now += given.takeover
    return _DROPPED


def draw_losses(rng: np.random.Generator, workers: int, rate: float, until: float) -> list[list[float]]:
    """For each worker, the times of a Poisson process with `rate` losses per unit of time, up to `until`."""
    counts = rng.poisson(rate * until, workers)
    return [sorted(rng.uniform(0.0, until, count).tolist()) for count in counts]
