"""Dispatch: assigns groups to members by expected lengths, as one pure function.

For the makespan, groups are assigned in turn, longest first, or in ranges of similar lengths, whichever is expected to
end first. The longest groups then go to members that decode few responses together, and hence each response faster
(StreamRL, arXiv 2504.15930, Algorithm 2). For machine time, similar lengths go together, so that a member with short
groups leaves early (RLHFless, arXiv 2602.22718, section 4.3). Every candidate is timed exactly
(tasks/planning/makespan.py). The trainer's engines stop early, but are assigned groups like members of the crew: their
unfinished responses are free for the crew.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from resources.prices import dollars
from tasks.planning.capacity import GroupLengths
from tasks.planning.division import assign_groups
from tasks.planning.makespan import (
    DispatchMember,
    Lengths,
    drawn_lengths,
    ends_s,
    lower_bound_s,
    mean_makespan_s,
    member_time_s,
    response_lengths,
)

__all__ = ["Assignment", "Dispatch", "DispatchMember", "dispatch"]


Objective = Literal["makespan", "gpu_seconds"]

# Of more responses than this, fewer ways to deal are compared, because each takes long and they differ little.
MANY_RESPONSES = 1 << 14

# Expectations are inexact: a bounded batch must promise more than this.
GAIN_MIN = 0.03
# How often lengths are drawn: fewer times for many responses, whose sums vary less.
DRAWS_MIN, DRAWS_MAX, DRAWN_RESPONSES = 2, 16, 1 << 12
# Exact times are asked for at most so many pairs of a group and a member; of many groups each adds little.
EXACT_PAIRS_MAX = 1 << 10
BISECTIONS = 8
# A member is isolated if its groups have this many times the tokens of the average group.
ISOLATED_RATIO = 1.25


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The groups of one member.

    Attributes:
        groups: group numbers in the order of beginning.
        batch_max: most responses that the member decodes together; None: the engine's limit.
        ends_s: expected seconds until the end of the last response, with the start; 0 without groups.
    """

    groups: tuple[int, ...]
    batch_max: int | None
    ends_s: float


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """The groups of all members.

    Attributes:
        assignments: assignment of each member, in the order of members.
        makespan_s: seconds until the last member has ended.
        machine_s: sum of the seconds until each member with groups has ended.
        usd: dollars of machine_s.
    """

    assignments: tuple[Assignment, ...]
    makespan_s: float
    machine_s: float
    usd: float


@dataclass(frozen=True)
class TimedAssignment:
    """A candidate of dispatch with its time.

    Attributes:
        groups: groups of each member in the order of beginning.
        ends_s: seconds until each member has decoded its groups.
    """

    groups: list[list[int]]
    ends_s: list[float]

    @property
    def makespan_s(self) -> float:
        return max(self.ends_s)


@dataclass(frozen=True)
class GroupWork:
    """The groups of an iteration.

    Attributes:
        lengths: expected response lengths, [groups, num_generations] tokens.
        order: group numbers, longest first.
        keep_order: True if a member begins groups in the order of group numbers; False: in `order`.
    """

    lengths: Lengths
    order: tuple[int, ...]
    keep_order: bool

    @cached_property
    def tokens(self) -> list[float]:
        """Tokens of each group, by number."""
        return [float(tokens) for tokens in self.lengths.sum(axis=1)]

    @cached_property
    def tokens_per_group(self) -> float:
        return math.fsum(self.tokens) / len(self.tokens)

    @cached_property
    def _place(self) -> dict[int, int]:
        return {group: place for place, group in enumerate(self.order)}

    def begun(self, groups: Sequence[int]) -> list[int]:
        """A member's groups in the order of beginning."""
        return sorted(groups) if self.keep_order else sorted(groups, key=self._place.__getitem__)

    def end_s(self, member: DispatchMember, groups: Sequence[int]) -> float:
        """Seconds until the member has decoded the given groups."""
        return ends_s(self.lengths, [self.begun(groups)], [member])[0]

    def timed(self, assigned: Sequence[Sequence[int]], members: Sequence[DispatchMember]) -> TimedAssignment:
        groups = [self.begun(part) for part in assigned]
        return TimedAssignment(groups, ends_s(self.lengths, groups, members))

    def seconds_per_token(self, member: DispatchMember, members: int) -> float:
        """Seconds for one token of the member's groups if each member decodes an even share at once."""
        batch = max(1, min(member.responses_max, math.ceil(self.lengths.size / members)))
        return member.step_time.step_s(batch) / batch


def dispatch(
    lengths: GroupLengths,
    num_generations: int,
    members: Sequence[DispatchMember],
    objective: Objective,
    *,
    keep_order: bool = False,
    length_max: float = math.inf,
) -> Dispatch:
    """Assign whole groups to members. Raises ValueError without members, and for impossible lengths.

    Groups with equal expected lengths are assigned evenly, by speed.

    Args:
        lengths: expected lengths of the groups' responses.
        num_generations: responses of each group.
        members: the machines.
        objective: "makespan" ends the last response as early as possible. "gpu_seconds" takes the least machine time
            (dollars, if every member has a price) among the candidates that end no later than even ranges of sorted
            groups.
        keep_order: True if a member begins groups in the order of group numbers; False: the longest first.
        length_max: limit of a response's length in tokens; without a limit the longest groups seem too long.
    """
    if not members:
        raise ValueError("members: none given; allowed: at least one")
    responses = response_lengths(lengths, num_generations, length_max)
    work = GroupWork(responses, tuple(np.lexsort((-responses[:, 0], -lengths.expected)).tolist()), keep_order)
    draws = min(DRAWS_MAX, max(DRAWS_MIN, DRAWN_RESPONSES // responses.size))
    drawn = drawn_lengths(lengths, num_generations, length_max, draws)
    candidate = _assigned(work, members, objective, drawn)
    assignments = tuple(
        _assignment(work, groups, end_s, member, len(members), drawn)
        for groups, end_s, member in zip(candidate.groups, candidate.ends_s, members, strict=True)
    )
    ends = [assignment.ends_s for assignment in assignments]
    return Dispatch(
        assignments=assignments,
        makespan_s=max(ends),
        machine_s=math.fsum(ends),
        usd=math.fsum(dollars(end_s, member.usd_per_h) for end_s, member in zip(ends, members, strict=True)),
    )


def _assigned(
    work: GroupWork, members: Sequence[DispatchMember], objective: Objective, drawn: Lengths
) -> TimedAssignment:
    """The best candidate."""
    evenly = in_turn(work, members)
    alike = not np.ptp(work.lengths, axis=0).any()
    if len(members) == 1 or (alike and all(member == members[0] for member in members)):
        return evenly
    if objective == "gpu_seconds" and not alike:
        return _cheapest(work, members)
    candidates = [evenly, longest_first(work, members)]
    if len(work.order) * len(members) <= EXACT_PAIRS_MAX:
        candidates.append(exactly_longest_first(work, members))
    if alike or work.lengths.size > MANY_RESPONSES:
        return min(candidates, key=lambda candidate: candidate.makespan_s)
    candidates.append(balanced_ranges(work, members))
    # The best candidate for exactly the expected lengths often suffers most from other lengths.
    return min(candidates, key=lambda candidate: mean_makespan_s(drawn, candidate.groups, members))


def in_turn(work: GroupWork, members: Sequence[DispatchMember]) -> TimedAssignment:
    """Groups assigned in turn by group number, as in a plan without known lengths."""
    return work.timed(assign_groups(len(work.order), len(members)), members)


def longest_first(work: GroupWork, members: Sequence[DispatchMember]) -> TimedAssignment:
    """Each next group goes to the member that would be free first if each decoded an even share at once (LPT)."""
    seconds = [work.seconds_per_token(member, len(members)) for member in members]
    heap = [(member.start_s, place) for place, member in enumerate(members)]
    heapq.heapify(heap)
    assigned: list[list[int]] = [[] for _ in members]
    for group in work.order:
        free_s, place = heap[0]
        assigned[place].append(group)
        heapq.heapreplace(heap, (free_s + work.tokens[group] * seconds[place], place))
    return work.timed(assigned, members)


def exactly_longest_first(work: GroupWork, members: Sequence[DispatchMember]) -> TimedAssignment:
    """Each next group goes to the member that would end first with the group, by exact times (LPT)."""
    assigned: list[list[int]] = [[] for _ in members]
    ends = [0.0] * len(members)
    for group in work.order:
        soonest_s, chosen = math.inf, 0
        # With more groups a member only ends later: a member that ends later already is not asked.
        for place in sorted(range(len(members)), key=ends.__getitem__):
            if ends[place] >= soonest_s:
                break
            with_it_s = work.end_s(members[place], [*assigned[place], group])
            if with_it_s < soonest_s:
                soonest_s, chosen = with_it_s, place
        assigned[chosen].append(group)
        ends[chosen] = soonest_s
    return work.timed(assigned, members)


def _cheapest(work: GroupWork, members: Sequence[DispatchMember]) -> TimedAssignment:
    """The candidate of the least machine time, or dollars, among ranges that end no later than even ranges."""
    places, even = _by_speed(members), even_ranges(work, members)
    by_price = sorted(places, key=lambda k: members[k].usd_per_h * members[k].step_time.step_s(1))
    full = [full_ranges(work, members, order, even.makespan_s) for order in (places, by_price)]
    prices = [member.usd_per_h for member in members]
    weights = prices if all(prices) else [1.0] * len(members)
    return min((even, *filter(None, full)), key=lambda candidate: float(np.dot(candidate.ends_s, weights)))


def balanced_ranges(work: GroupWork, members: Sequence[DispatchMember]) -> TimedAssignment:
    """Contiguous ranges with the earliest last end: few of the longest groups for the quickest member."""
    places, best = _by_speed(members), even_ranges(work, members)
    least_s = lower_bound_s(work.lengths, members)
    for _ in range(BISECTIONS):
        middle_s = (least_s + best.makespan_s) / 2
        found = full_ranges(work, members, places, middle_s)
        least_s, best = (middle_s, best) if found is None else (least_s, found)
    return best


def even_ranges(work: GroupWork, members: Sequence[DispatchMember]) -> TimedAssignment:
    """Contiguous ranges of groups, sized by each member's speed, the longest for the quickest."""
    places = _by_speed(members)
    speeds = [1 / work.seconds_per_token(members[place], len(members)) for place in places]
    cuts = [0, *(round(share * len(work.order)) for share in accumulate(speed / sum(speeds) for speed in speeds))]
    assigned: list[Sequence[int]] = [()] * len(members)
    for place, (first, end) in zip(places, pairwise(cuts), strict=True):
        assigned[place] = work.order[first:end]
    return work.timed(assigned, members)


def full_ranges(
    work: GroupWork, members: Sequence[DispatchMember], places: Sequence[int], cap_s: float
) -> TimedAssignment | None:
    """Contiguous ranges with as many groups as each member decodes in `cap_s`, in the order `places`.

    The last members may get no group. None if groups are left.
    """
    assigned: list[Sequence[int]] = [()] * len(members)
    left = work.order
    for place in places:
        count = _count_within(work, members[place], left, cap_s)
        assigned[place], left = left[:count], left[count:]
    return None if left else work.timed(assigned, members)


def _by_speed(members: Sequence[DispatchMember]) -> list[int]:
    """Places of the members, ordered by the time of a single response."""
    return sorted(range(len(members)), key=lambda k: (members[k].step_time.step_s(1), members[k].start_s, k))


def _count_within(work: GroupWork, member: DispatchMember, groups: Sequence[int], cap_s: float) -> int:
    """The number of groups from the start of `groups` that the member decodes in `cap_s`."""
    low, high = 0, 1
    while high <= len(groups) and work.end_s(member, groups[:high]) <= cap_s:
        low, high = high, 2 * high
    high = min(high, len(groups) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if work.end_s(member, groups[:middle]) <= cap_s else (low, middle)
    return low


def _assignment(
    work: GroupWork, groups: list[int], end_s: float, member: DispatchMember, members: int, drawn: Lengths
) -> Assignment:
    """The assignment with a bound on the batch if a smaller batch ends sooner, or keeps the longest groups apart."""
    if not groups:
        return Assignment(groups=(), batch_max=None, ends_s=0.0)
    tokens = work.lengths[groups]
    batches = _smaller_batches(member, min(tokens.size, member.responses_max), tokens.shape[1])
    times_s = {batch: member.start_s + member_time_s(tokens, member.step_time, batch) for batch in batches}
    batch = min(batches, key=times_s.__getitem__, default=0)
    if batch and times_s[batch] < (1 - GAIN_MIN) * end_s:
        # Mean over lengths drawn anew, in which any response of a group may come first.
        bounded = replace(member, responses_max=batch)
        whole_s, in_part_s = (mean_makespan_s(drawn, [groups], [each]) for each in (member, bounded))
        if in_part_s < (1 - GAIN_MIN) * whole_s:
            return Assignment(groups=tuple(groups), batch_max=batch, ends_s=times_s[batch])
    # A member with fewer and longer groups than others should not take unstarted work from them meanwhile.
    few = tokens.size < member.responses_max and len(groups) * members < len(work.order)
    longer = tokens.sum() > ISOLATED_RATIO * work.tokens_per_group * len(groups)
    return Assignment(groups=tuple(groups), batch_max=tokens.size if few and longer else None, ends_s=end_s)


def _smaller_batches(member: DispatchMember, batch: int, num_generations: int) -> list[int]:
    """Batches of whole groups worth trying: half, a quarter, and the batch at which the decode rate stops rising."""
    tried = {batch // 2, batch // 4, member.step_time.plateau(batch) + num_generations - 1}
    sizes = {size - size % num_generations for size in tried}
    return sorted((size for size in sizes if 0 < size < batch), reverse=True)
