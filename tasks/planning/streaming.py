"""When an iteration ends if the trainer takes groups as they end, so that not only the last response counts.

Members that all end together, as dealing for the makespan arranges, may have no whole group for the trainer until then.
Pure functions of expected lengths.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tasks.planning.makespan import Lengths, Member

Seconds = npt.NDArray[np.float64]


def group_ends_s(lengths: Lengths, groups: Sequence[int], member: Member, batch_max: int | None = None) -> Seconds:
    """When each of a member's groups has ended with all its responses: [len(groups)], in their order.

    lengths: of all groups, [groups, num_generations] tokens. groups: in the order in which they begin.
    """
    tokens = lengths[list(groups)].ravel()
    slots = min(member.responses_max, batch_max or member.responses_max)
    # A response ends when its slot has decoded this many tokens: its own and those before it.
    ends, totals = tokens, np.sort(tokens)
    if len(tokens) > slots:
        ends, totals = _in_slots(tokens, slots)
    # Between two ends, all remaining responses decode together.
    steps = np.diff(totals, prepend=0.0) * member.step_time.table(len(totals))[:0:-1]
    at_s = np.interp(ends, np.concatenate([[0.0], totals]), np.concatenate([[0.0], np.cumsum(steps)]))
    return np.asarray(member.start_s + at_s.reshape(len(groups), -1).max(axis=1))


def long_then_short(groups: Sequence[int], share: float) -> tuple[int, ...]:
    """Reorder groups that come longest first: this share of them, then the others from the shortest on.

    So the longest do not end last, and the others do not all end with them.
    """
    first = math.ceil(share * len(groups))
    return (*groups[:first], *reversed(groups[first:]))


def streamed_s(ends_s: Seconds, tokens: Seconds, train_s: float, order: npt.NDArray[np.intp] | None = None) -> float:
    """When everything is trained on, if training takes `train_s` in total.

    ends_s, tokens: by group. order: the order in which training takes groups; None: as they end.
    """
    order = np.argsort(ends_s, kind="stable") if order is None else order
    left_s = train_s * np.cumsum(tokens[order][::-1])[::-1] / tokens.sum()
    return float((ends_s[order] + left_s).max())


def _in_slots(tokens: Seconds, slots: int) -> tuple[Seconds, Seconds]:
    """Where each response ends in its slot, and all slots' totals, ascending; a free slot takes the next response."""
    heap = [0.0] * slots
    ends = np.empty_like(tokens)
    for index, length in enumerate(tokens.tolist()):
        ends[index] = heap[0] + length
        heapq.heapreplace(heap, float(ends[index]))
    return ends, np.sort(np.array(heap))
