"""Dispatch: decides which member decodes which groups, from expected lengths, as one pure function.

For the makespan it follows StreamRL's Algorithm 2 (arXiv 2504.15930): the longest groups go to members of their own,
which decode fewer responses together and hence each of them faster; inside a member the longest come first. For machine
time it follows RLHFless (arXiv 2602.22718, section 4.3): similar lengths go together, so that a member with short ones
leaves early. Every considered dealing is timed exactly (tasks/planning/makespan.py), and dealing in turn is always one
of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from resources.prices import dollars
from tasks.planning.dealing import (
    Dealing,
    Work,
    balanced_ranges,
    even_ranges,
    exactly_longest_first,
    exchanged,
    full_ranges,
    in_turn,
    longest_first,
    tail_apart,
)
from tasks.planning.makespan import (
    Lengths,
    Member,
    drawn_lengths,
    lower_bound_s,
    mean_makespan_s,
    member_time_s,
    response_lengths,
)
from tasks.planning.offer import GroupLengths

__all__ = ["Assignment", "Dispatch", "Member", "dispatch"]

Objective = Literal["makespan", "gpu_seconds"]

# Expectations are inexact: a bounded batch, or any dealing but a plain one, must promise more than this.
GAIN_MIN = 0.03
# How often lengths are drawn: fewer times for many responses, whose sums vary less.
DRAWS_MIN, DRAWS_MAX, DRAWN_RESPONSES = 2, 16, 1 << 12
PROMISING_MAX = 4
# Up to so many groups are dealt by exact times, too.
EXACT_GROUPS_MAX = 32
# Costs within this count as equal.
EQUAL = 1.01
# A member that is busy for this share of its window gets no group that it would have to hand on.
BUSY = 0.8
# Decoding less than this share of a response is not worth computing its cache twice.
HANDED_ON_MIN = 0.1
# A member is isolated if its groups have this many times the tokens of the average group.
ISOLATED_RATIO = 1.25


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One member's groups, in the order in which it begins them, and how many responses it decodes together.

    batch_max: None: as many as it can. ends_s: expected end, its start included; 0 without groups.
    """

    groups: tuple[int, ...]
    batch_max: int | None
    ends_s: float


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """One assignment per member, in their order; machine_s and usd: of the members with work, until each has ended."""

    assignments: tuple[Assignment, ...]
    makespan_s: float
    machine_s: float
    usd: float


def dispatch(
    lengths: GroupLengths,
    num_generations: int,
    members: Sequence[Member],
    objective: Objective,
    *,
    keep_order: bool = False,
    length_max: float = math.inf,
) -> Dispatch:
    """Deal whole groups to members.

    "makespan" ends the last response as early as possible. "gpu_seconds" takes the least machine time (dollars, if
    every member has a price) of all dealings that end no later than even ranges of sorted groups. Groups that are all
    expected alike are dealt evenly, by speed. A time-limited member (with window_s) gets the shortest groups that it
    can finish; if that leaves it idle, enough to stay busy. Members without a limit continue what it has not finished,
    and at least one of them has work. Limits are ignored if all members have one, and have no effect on members that
    finish in time anyway.
    keep_order: a member begins its groups in the order of their numbers, else the longest first. length_max: the limit
    of a response's length; without it the longest groups seem longer than they can be. Raises ValueError without
    members, and for impossible lengths.
    """
    if not members:
        raise ValueError("members: none given; allowed: at least one")
    responses = response_lengths(lengths, num_generations, length_max)
    dealer = _Dealer(lengths, num_generations, length_max, objective)
    order = np.lexsort((-responses[:, 0], -lengths.expected)).tolist()
    work = Work(responses, tuple(order), keep_order)
    timed = sum(member.window_s is not None for member in members)
    if 0 < timed < len(members):
        dealt = _one_stays(work, members, _within_windows(dealer, work, members))
    else:
        dealt = dealer.deal(work, members)
    assignments = [
        dealer.assignment(work, groups, end_s, member, len(members))
        for groups, end_s, member in zip(dealt.groups, dealt.ends_s, members, strict=True)
    ]
    assignments = _handed_on(work, members, assignments)
    ends = [assignment.ends_s for assignment in assignments]
    return Dispatch(
        assignments=tuple(assignments),
        makespan_s=max(ends),
        machine_s=math.fsum(ends),
        usd=math.fsum(dollars(end_s, member.usd_per_h) for end_s, member in zip(ends, members, strict=True)),
    )


@dataclass(frozen=True)
class _Dealer:
    """Chooses among the ways to deal."""

    expected: GroupLengths
    num_generations: int
    length_max: float
    objective: Objective

    @cached_property
    def drawn(self) -> Lengths:
        """Random lengths of all groups, as they may turn out."""
        draws = DRAWN_RESPONSES // (len(self.expected) * self.num_generations)
        draws = min(DRAWS_MAX, max(DRAWS_MIN, draws))
        return drawn_lengths(self.expected, self.num_generations, self.length_max, draws)

    def deal(self, work: Work, members: Sequence[Member]) -> Dealing:
        """Deal all of `work`, ignoring windows."""
        if not work.order:
            return work.timed([[] for _ in members], members)
        evenly = in_turn(work, members)
        alike = not np.ptp(work.lengths[list(work.order)], axis=0).any()
        if len(members) == 1 or (alike and all(member == members[0] for member in members)):
            return evenly
        if self.objective == "gpu_seconds" and not alike:
            return _cheapest(work, members, evenly)
        plain = min(self._plain(work, members, evenly, alike=alike), key=lambda dealt: dealt.makespan_s)
        if alike:
            soonest = min(balanced_ranges(work, members), key=lambda dealt: dealt.makespan_s)
            return soonest if soonest.makespan_s < (1 - GAIN_MIN) * plain.makespan_s else plain
        return self._soonest(members, plain, [*balanced_ranges(work, members), *tail_apart(work, members)])

    def _plain(self, work: Work, members: Sequence[Member], evenly: Dealing, *, alike: bool) -> list[Dealing]:
        plain = [evenly, longest_first(work, members)]
        if len(work.order) <= EXACT_GROUPS_MAX and not alike:
            # Of many groups each adds little, so that rates are as good as exact times.
            plain.append(exactly_longest_first(work, members))
            plain += [exchanged(work, members, dealt) for dealt in plain]
        return plain

    def _soonest(self, members: Sequence[Member], plain: Dealing, others: Sequence[Dealing]) -> Dealing:
        """The dealing with the earliest mean end over random lengths; `plain` unless another one gains enough.

        The best dealing for exactly the expected lengths often suffers most from other lengths.
        """
        promising = [dealt for dealt in others if dealt.makespan_s < plain.makespan_s]
        # Of many responses few dealings are timed, as few lengths are drawn.
        most = PROMISING_MAX if len(self.drawn) > DRAWS_MIN else 1
        promising = sorted(promising, key=lambda dealt: dealt.makespan_s)[:most]
        if not promising:
            return plain
        means = [mean_makespan_s(self.drawn, dealt.groups, members) for dealt in promising]
        soonest = min(range(len(means)), key=means.__getitem__)
        enough = (1 - GAIN_MIN) * mean_makespan_s(self.drawn, plain.groups, members)
        return promising[soonest] if means[soonest] < enough else plain

    def assignment(self, work: Work, groups: list[int], ends_s: float, member: Member, members: int) -> Assignment:
        """Bound a member's batch if that decodes its groups sooner, or keeps the longest groups apart."""
        if not groups:
            return Assignment(groups=(), batch_max=None, ends_s=0.0)
        tokens = work.lengths[groups]
        batch_max, bounded_s = None, ends_s
        batches = _smaller_batches(member, min(tokens.size, member.responses_max), self.num_generations)
        times_s = {batch: member.start_s + member_time_s(tokens, member.step_time, batch) for batch in batches}
        batch = min(batches, key=times_s.__getitem__, default=0)
        if batch and times_s[batch] < (1 - GAIN_MIN) * ends_s:
            # Mean over lengths drawn anew, in which any response of a group may come first.
            whole_s, in_part_s = (
                mean_makespan_s(self.drawn, [groups], [who]) for who in (member, replace(member, responses_max=batch))
            )
            if in_part_s < (1 - GAIN_MIN) * whole_s:
                batch_max, bounded_s = batch, times_s[batch]
        # A member with fewer and longer groups than others should not take unstarted work from them meanwhile.
        few = tokens.size < member.responses_max and len(groups) * members < len(work.order)
        if batch_max is None and few and tokens.sum() > ISOLATED_RATIO * work.tokens_per_group * len(groups):
            batch_max = tokens.size
        return Assignment(groups=tuple(groups), batch_max=batch_max, ends_s=bounded_s)


def _cheapest(work: Work, members: Sequence[Member], evenly: Dealing) -> Dealing:
    """The least machine time, or dollars, of all that end no later than even ranges; of equals, the earliest."""
    ranges = even_ranges(work, members)
    prices = [member.usd_per_h for member in members]
    weights = prices if all(prices) else [1.0] * len(members)
    dealings = [evenly, longest_first(work, members), ranges, *full_ranges(work, members, ranges.makespan_s)]
    costs = [float(np.dot(dealt.ends_s, weights)) for dealt in dealings]
    allowed = [pair for pair in zip(costs, dealings, strict=True) if pair[1].makespan_s <= ranges.makespan_s]
    enough = EQUAL * min(cost for cost, _ in allowed)
    return min((dealt for cost, dealt in allowed if cost <= enough), key=lambda dealt: dealt.makespan_s)


def _within_windows(dealer: _Dealer, work: Work, members: Sequence[Member]) -> Dealing:
    """Deal again until no member is expected to work beyond its window by more than staying busy until then takes.

    A member that would, gets the shortest groups; the others get the rest.
    """
    windows = [math.inf if member.window_s is None else member.window_s for member in members]
    # A member whose window ends before this bound would be late in any good dealing.
    bound_s = lower_bound_s(work.lengths, members)
    settled = max((window_s for window_s in windows if window_s < bound_s), default=-1.0)
    while True:
        order = work.order
        groups: list[list[int]] = [[] for _ in members]
        for place in sorted(range(len(members)), key=windows.__getitem__):
            if windows[place] <= settled:
                count = _count_for(replace(work, order=order), members[place], len(members))
                groups[place] = list(order[len(order) - count :])
                order = order[: len(order) - count]
        staying = [place for place, window_s in enumerate(windows) if window_s > settled]
        rest = dealer.deal(replace(work, order=order), [members[place] for place in staying])
        for place, part in zip(staying, rest.groups, strict=True):
            groups[place] = part
        dealt = work.timed(groups, members)
        late = [w for w, end_s in zip(windows, dealt.ends_s, strict=True) if settled < w < end_s]
        if not late:
            return dealt
        settled = max(late)


def _count_for(work: Work, member: Member, members: int) -> int:
    """How many of the shortest groups the member ends in its window, or else how many keep it busy until its end."""
    tokens_max = _tokens_max(work, member, members)
    batch = _batch(work, member, members)
    by_group = np.minimum(work.lengths[list(work.order[::-1])], tokens_max).sum(axis=1)
    decoded = np.concatenate([[0.0], np.cumsum(by_group)])
    fitting = _count_within(work, member)
    if decoded[fitting] >= BUSY * batch * tokens_max:
        return fitting
    if tokens_max < HANDED_ON_MIN * float(work.lengths[work.order[-1]].mean()):
        return fitting
    return max(fitting, min(len(work.order), int(np.searchsorted(decoded, batch * tokens_max))))


def _batch(work: Work, member: Member, members: int) -> int:
    """How many responses it decodes together if all members decode equally many."""
    return min(member.responses_max, math.ceil(work.responses / members))


def _tokens_max(work: Work, member: Member, members: int) -> float:
    """How many tokens of one response it decodes in its window."""
    window_s = math.inf if member.window_s is None else member.window_s
    return max(0.0, window_s - member.start_s) / member.step_time.step_s(max(1, _batch(work, member, members)))


def _count_within(work: Work, member: Member) -> int:
    """How many of the shortest groups the member ends in its window."""
    window_s = math.inf if member.window_s is None else member.window_s

    def fits(count: int) -> bool:
        return work.timed([work.order[len(work.order) - count :]], [member]).makespan_s <= window_s

    low, high = 0, 1
    while high <= len(work.order) and fits(high):
        low, high = high, 2 * high
    high = min(high, len(work.order) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _one_stays(work: Work, members: Sequence[Member], dealt: Dealing) -> Dealing:
    """Give one group to a member without a window if none has any, so that it can continue the others' work."""
    staying = [place for place, member in enumerate(members) if member.window_s is None]
    if not work.order or any(dealt.groups[place] for place in staying):
        return dealt
    groups = [[group for group in dealt_to if group != work.order[-1]] for dealt_to in dealt.groups]
    groups[min(staying, key=lambda place: members[place].start_s)].append(work.order[-1])
    return work.timed(groups, members)


def _handed_on(work: Work, members: Sequence[Member], assignments: list[Assignment]) -> list[Assignment]:
    """End members at their windows; what they leave delays the others, by their joint rate."""
    left, rate = 0.0, 0.0
    for member, assignment in zip(members, assignments, strict=True):
        if member.window_s is None:
            rate += member.step_time.tokens_per_s(max(1, _batch(work, member, len(members)))) * bool(assignment.groups)
        elif assignment.ends_s > member.window_s:
            tokens = work.lengths[list(assignment.groups)]
            left += float(np.maximum(0.0, tokens - _tokens_max(work, member, len(members))).sum())
    if not left or not rate:
        return assignments
    return [
        replace(assignment, ends_s=assignment.ends_s + left / rate)
        if member.window_s is None and assignment.groups
        else replace(assignment, ends_s=min(assignment.ends_s, member.window_s or math.inf))
        for member, assignment in zip(members, assignments, strict=True)
    ]


def _smaller_batches(member: Member, batch: int, num_generations: int) -> list[int]:
    """Batches of whole groups worth trying: half, a quarter, and the one at which the decode rate stops rising."""
    tried = {batch // 2, batch // 4, member.step_time.plateau(batch) + num_generations - 1}
    sizes = {size - size % num_generations for size in tried}
    return sorted((size for size in sizes if 0 < size < batch), reverse=True)
