"""Presence of a crew at the conclusion of its iteration: the remaining members, and the slots that never started.

A conclusion waits for no rollout pod. A member that is about to leave gets the time for a good-bye: the report
counts a member without a good-bye as lost.
"""

import logging
from collections.abc import Mapping

from storage.clock import Clock
from storage.journal.liveness import read_heartbeat
from storage.records import layout
from storage.records.crew_records import HeartbeatRecord, ended_slots
from storage.records.records import TRAIN_POOL, PlanRecord
from storage.records.run import read_plan, read_report, read_settings
from storage.stores.store import ObjectStore

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.2


def await_goodbyes(store: ObjectStore, plan: PlanRecord, limit_s: float, clock: Clock) -> None:
    """Return when every member of a closed iteration has said that it left, or after limit_s.

    Members learn at their next flush that an iteration is closed. A process followed by another one in its planned slot
    is dead, and not waited for. Neither are the trainer's members: its task has ended.
    """
    ends_s = clock.monotonic() + limit_s
    known: dict[str, HeartbeatRecord] = {}
    while staying := _staying(store, plan, known):
        if clock.monotonic() >= ends_s:
            log.info("iteration %d: %d members have not said that they left", plan.iteration, len(staying))
            return
        clock.sleep(POLL_INTERVAL_S)


def _staying(store: ObjectStore, plan: PlanRecord, known: dict[str, HeartbeatRecord]) -> list[HeartbeatRecord]:
    """Return the members that have not left.

    known: heartbeats of an earlier reading; a member that has left does not return. A member with an unreadable
    heartbeat cannot say good-bye, and is not waited for.
    """
    for key in store.list(layout.alive_all(plan.iteration)):
        if key not in known or known[key].state != "gone":
            found = read_heartbeat(store, key)
            if found is None:
                known.pop(key, None)
            else:
                known[key] = found
    last: dict[int | str, HeartbeatRecord] = {}
    for alive in known.values():
        # Slot numbers beyond the plan may be shared.
        who = alive.slot if alive.slot < len(plan.slots) else alive.incarnation
        if who not in last or last[who].started_at_s < alive.started_at_s:
            last[who] = alive
    return [alive for alive in last.values() if alive.state != "gone" and alive.pool != TRAIN_POOL]


def slots_not_come(store: ObjectStore, iteration: int, execution: str) -> dict[int, list[int]]:
    """Map iterations to the slots that the execution may still start although the iteration is concluded.

    iteration: the last of the execution, committed. Left out are slots with a process that took part, and slots of
    an ended map. A standing member is one pod for all iterations, listed here under the last iteration.
    """
    found: dict[int, list[int]] = {}
    last, stands, never_came = iteration, False, None
    while iteration >= 0 and (settings := read_settings(store, iteration)) and settings.execution == execution:
        stands = settings.config.get("rollout", {}).get("crew") == "standing"
        plan, came = read_plan(store, iteration), {life.slot for life in read_report(store, iteration).lives}
        missing = {place.slot for place in plan.crew_slots} - came - ended_slots(store, iteration, execution)
        never_came = missing if never_came is None else never_came & missing
        if missing:
            found[iteration] = sorted(missing)
        iteration -= 1
    if stands:
        return {last: sorted(never_came)} if never_came else {}
    return found


def described(missing: Mapping[int, list[int]]) -> str:
    """These slots in a sentence; empty if there are none."""
    if not missing:
        return ""
    count, iterations = sum(map(len, missing.values())), ", ".join(map(str, sorted(missing)))
    return (
        f"{count} rollout pods of this execution had not come when their iterations ({iterations}) were concluded. "
        "Nothing waits for them but the execution, which Flyte ends when each has run or its pending time is over "
        "(plugins.k8s.pod-pending-timeout)."
    )
