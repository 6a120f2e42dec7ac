"""How the machines of each pool did in an iteration, from their heartbeats; the next plan is made from it.

This module knows no store and no prices.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from storage.records.crew_records import HeartbeatRecord
from storage.records.planning_records import PoolObservation
from storage.records.records import TRAIN_POOL, SlotLife
from tasks.crew_model.decode_rate import POINTS_MAX

Points = tuple[tuple[int, float], ...]


def pool_observations(
    lives: Sequence[SlotLife],
    heartbeats: Sequence[HeartbeatRecord],
    planned: Iterable[str] = (),
    planned_at_s: float = -math.inf,
) -> tuple[PoolObservation, ...]:
    """Return one observation per pool, by name, for the pools of the lives and the pools of `planned`.

    A machine that left for want of work counts as present until the end; a machine lost or given notice does not.
    On the trainer's machine a handover is no loss, because training begins. A start is not counted from before the
    plan, at planned_at_s, for which a standing member waited.
    """
    points: dict[str, list[Points]] = defaultdict(list)
    for heartbeat in heartbeats:
        points[heartbeat.pool].append(heartbeat.step_s)
    of: dict[str, list[SlotLife]] = defaultdict(list)
    for life in lives:
        of[life.pool].append(life)
    worked = [life.working_at_s for life in lives if life.working_at_s is not None]
    ends = [life.ended_at_s for life in lives]
    window = (min(worked), max(ends)) if worked else None
    return tuple(_observed(pool, of[pool], points[pool], window, planned_at_s) for pool in sorted({*of, *planned}))


def _observed(
    pool: str,
    lives: Sequence[SlotLife],
    points: Sequence[Points],
    window: tuple[float, float] | None,
    planned_at_s: float,
) -> PoolObservation:
    last = {life.slot: life for life in sorted(lives, key=lambda life: life.started_at_s)}
    stays = {life.incarnation for life in last.values() if life.state == "gone"}
    worked = [(life.started_at_s, life.working_at_s) for life in lives if life.working_at_s is not None]
    # By a wrong clock, a member may have worked before the plan was written.
    starts = [max(0.0, working_at_s - max(started_at_s, planned_at_s)) for started_at_s, working_at_s in worked]
    given_back = ("lost",) if pool == TRAIN_POOL else ("lost", "left")
    return PoolObservation(
        pool=pool,
        members=_mean_members(lives, stays, window),
        members_at_end=len(stays),
        machine_s=sum(life.ended_at_s - life.started_at_s for life in lives),
        losses=sum(life.state in given_back for life in lives),
        start_s=statistics.median(starts) if starts else None,
        step_s=pooled(points),
    )


def _mean_members(lives: Sequence[SlotLife], stays: set[str], window: tuple[float, float] | None) -> float:
    """The mean number of members over the window, from the first weights in place to the last heartbeat."""
    if window is None or window[1] <= window[0]:
        return float(len(stays))
    spans = [
        (life.working_at_s, window[1] if life.incarnation in stays else life.ended_at_s)
        for life in lives
        if life.working_at_s is not None
    ]
    return sum(max(0.0, end_s - start_s) for start_s, end_s in spans) / (window[1] - window[0])


def pooled(points: Sequence[Points]) -> Points:
    """The median of several members' step times at each batch size that any of them measured; at most POINTS_MAX."""
    measured: dict[int, list[float]] = defaultdict(list)
    for member in points:
        for batch, step_s in member:
            measured[batch].append(step_s)
    batches = sorted(measured)
    if len(batches) > POINTS_MAX:
        batches = [batches[index] for index in np.linspace(0, len(batches) - 1, POINTS_MAX).round().astype(int)]
    return tuple((batch, statistics.median(measured[batch])) for batch in batches)
