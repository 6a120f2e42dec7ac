"""One clock: times of machines whose clock is provably wrong, moved to where they can have been.

Differences between the wall clocks of two machines are no times. A life cannot end before its iteration was
planned nor after its conclusion; a life that seems to proves a wrong clock. Durations measured by one machine
stay; only the beginning moves. An error shorter than the iteration's own time cannot be detected.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from storage.records.crew_records import HeartbeatRecord
from storage.records.records import TRAIN_POOL, TrainingRecord

log = logging.getLogger(__name__)
# Clocks of machines that ask a time server differ by less.
CLOCKS_AGREE_S = 5.0


def on_one_clock(
    heartbeats: Sequence[HeartbeatRecord], training: TrainingRecord, planned_at_s: float, concluded_at_s: float
) -> tuple[list[HeartbeatRecord], TrainingRecord]:
    """Heartbeats and training as the clock of plan and conclusion would have them (seconds since 1970).

    What is moved begins with the first life whose clock may be right, or else with the plan. The lives of a machine are
    moved together; the trainer's generating members stay with its training. No life and no training has a negative
    duration.
    """

    def is_wrong(ended_at_s: float) -> bool:
        return not planned_at_s - CLOCKS_AGREE_S <= ended_at_s <= concluded_at_s + CLOCKS_AGREE_S

    fair = [alive.started_at_s for alive in heartbeats if not is_wrong(alive.updated_at_s)]
    begins_s = max(planned_at_s, min(fair, default=planned_at_s))
    crew = [alive for alive in heartbeats if alive.pool != TRAIN_POOL]
    trainers = [alive for alive in heartbeats if alive.pool == TRAIN_POOL]
    # By machine, and then one by one, because a clock may also have been set meanwhile.
    for machine_of in (_host, _incarnation):
        crew = _together(crew, machine_of, is_wrong, begins_s)
    if is_wrong(training.ended_at_s):
        first_s = min([training.started_at_s, *(alive.started_at_s for alive in trainers)])
        by_s = _logged_move("the trainer", begins_s - first_s)
        trainers = [_moved(alive, by_s) for alive in trainers]
        training = replace(training, started_at_s=training.started_at_s + by_s, ended_at_s=training.ended_at_s + by_s)
    if training.started_at_s > training.ended_at_s:
        training = replace(training, started_at_s=min(begins_s, training.ended_at_s))
    return [in_order(alive, begins_s) for alive in (*crew, *trainers)], training


def concluded_at(planned_at_s: float, training: TrainingRecord, wall_s: float) -> float:
    """When an iteration is concluded (seconds since 1970), by the clock `wall_s` of the machine that concludes it.

    Nothing is concluded before it was planned and trained. If the clock says so, it is behind that of the plan, and the
    training's end counts, if its own clock may be right, or else the plan.
    """
    if wall_s >= planned_at_s:
        return wall_s
    log.warning("the clock of the machine that concludes is %.0f s behind that of the plan", planned_at_s - wall_s)
    return max(planned_at_s, training.ended_at_s)


def in_order(alive: HeartbeatRecord, begins_s: float) -> HeartbeatRecord:
    """Return the life with its time of weights between beginning and end, even after a change of its clock.

    No duration is then negative; the next plan would refuse a negative one.
    """
    started_at_s, ended_at_s = alive.started_at_s, alive.updated_at_s
    if started_at_s > ended_at_s:
        started_at_s = min(begins_s, ended_at_s)
    working_at_s = alive.working_at_s
    if working_at_s is not None:
        working_at_s = min(max(working_at_s, started_at_s), ended_at_s)
    return replace(alive, started_at_s=started_at_s, working_at_s=working_at_s)


def _host(alive: HeartbeatRecord) -> str:
    return alive.host


def _incarnation(alive: HeartbeatRecord) -> str:
    return alive.incarnation


def _together(
    heartbeats: Sequence[HeartbeatRecord],
    machine_of: Callable[[HeartbeatRecord], str],
    is_wrong: Callable[[float], bool],
    begins_s: float,
) -> list[HeartbeatRecord]:
    """Return the heartbeats; lives of a machine with a wrong clock move together, the first to `begins_s`."""
    lives: dict[str, list[HeartbeatRecord]] = defaultdict(list)
    for alive in heartbeats:
        lives[machine_of(alive)].append(alive)
    found: list[HeartbeatRecord] = []
    for machine, of_it in lives.items():
        by_s = 0.0
        if any(is_wrong(alive.updated_at_s) for alive in of_it):
            by_s = _logged_move(machine, begins_s - min(alive.started_at_s for alive in of_it))
        found += [_moved(alive, by_s) for alive in of_it]
    return found


def _logged_move(machine: str, by_s: float) -> float:
    log.warning("the clock of %s is wrong; its times are moved by %.0f s", machine, by_s)
    return by_s


def _moved(alive: HeartbeatRecord, by_s: float) -> HeartbeatRecord:
    working_at_s = None if alive.working_at_s is None else alive.working_at_s + by_s
    return replace(
        alive,
        started_at_s=alive.started_at_s + by_s,
        updated_at_s=alive.updated_at_s + by_s,
        working_at_s=working_at_s,
    )
