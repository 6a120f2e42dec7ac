"""What a worker of several ranks does, from what each of its processes says: pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from storage.fleet.spent_records import Tier
from tasks.learning.rank_ends import RankFailure
from tasks.sharing.workers import Restored, WorkerPhase, WorkerState

# How far an order has got; phases with one number are as far.
PROGRESS: dict[WorkerPhase, int] = {
    "absent": 0,
    "prefetching": 0,
    "restoring": 0,
    "replaying": 1,
    "waiting": 2,
    "training": 2,
    "parking": 3,
    "publishing": 4,
    "parked": 5,
}


def merged(states: Sequence[WorkerState]) -> WorkerState:
    """The state of a worker, none of whose ranks has failed: that of the rank furthest behind, the first of several.

    It holds a resident state only if every rank holds its part of the same one.
    """
    behind = min(states, key=lambda state: PROGRESS[state.phase])
    digests = {state.digest for state in states}
    return replace(
        behind,
        digest=behind.digest if len(digests) == 1 else None,
        bytes_held=sum(state.bytes_held for state in states),
        restored=_together([state.restored for state in states]),
        replays=max(state.replays for state in states),
    )


def _together(restored: Sequence[Restored | None]) -> Restored | None:
    """How all ranks got their parts, from the furthest tier; None unless all have them."""
    found = [each for each in restored if each is not None]
    if len(found) < len(restored):
        return None
    return Restored(
        tier=max((each.tier for each in found), key=get_args(Tier).index),
        seconds=max(each.seconds for each in found),
        num_bytes=sum(each.num_bytes for each in found),
        ahead=found[0].ahead,
    )


def failed(last: WorkerState, failure: RankFailure) -> WorkerState:
    """The state of a worker whose processes have all ended for this reason; `last` is that before."""
    return replace(last, phase="failed", digest=None, bytes_held=0, message=failure.message, lasting=failure.lasting)
