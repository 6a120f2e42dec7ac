"""What a worker of several ranks does, and why it has failed, from what each of its processes says: pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from storage.fleet_records import Tier
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a rank's process ended. code: its exit code, or minus the signal. killed: the host ended it, after another.

    failure: what it said before, at `told_at_s` of the machine's monotonic clock; None: it said nothing.
    """

    rank: int
    code: int
    killed: bool = False
    failure: WorkerState | None = None
    told_at_s: float = 0.0


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


def failed(last: WorkerState, ends: Sequence[RankEnd]) -> WorkerState:
    """The state of a worker whose processes have all ended; `last` is that before."""
    # A failure that lasts is the reason, whatever else ended: no rank says so of what it only suffers from another
    # (`misses_peer`), and hidden, it would be repeated for ever. NCCL's watchdog aborts a rank that waits for the one
    # that failed, without a word. Next comes a rank that ended so, as by SIGKILL: the others say then that they miss
    # it. Else the first that was said is the reason, because what is said later may be a consequence.
    told = [(end.told_at_s, end.failure) for end in ends if end.failure is not None]
    silent = [end for end in ends if end.failure is None and not end.killed]
    lost = replace(last, phase="failed", digest=None, bytes_held=0, message="it was ended")
    reason = min(told, key=lambda each: (not each[1].lasting, each[0]))[1] if told else lost
    if silent and not reason.lasting:
        which = "its process" if len(ends) == 1 else f"its rank {silent[0].rank}"
        return replace(lost, message=f"{which} ended with {silent[0].code}")
    return replace(lost, message=reason.message, lasting=reason.lasting)
