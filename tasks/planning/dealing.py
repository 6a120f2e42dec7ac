"""Ways to deal groups that are sorted by expected length; the caller chooses among them by their exact times.

They are: longest first (LPT), by rates or by exact times; the longest apart, on members of their own (StreamRL, arXiv
2504.15930, Algorithm 2); contiguous ranges (RLHFless, arXiv 2602.22718, section 4.3), either even or as much as each
member ends in a given time.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, combinations, pairwise

import numpy as np
import numpy.typing as npt

from tasks.planning.division import assign_groups
from tasks.planning.makespan import Lengths, Member, ends_s

TAIL_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
FILL_ROUNDS = 4
# Of more responses than this, fewer shares and rounds are tried: each takes long, and they differ little.
MANY_RESPONSES, TAIL_SHARES_OF_MANY, FILL_ROUNDS_OF_MANY = 1 << 14, (0.05, 0.2), 2
EXCHANGES = 16
BISECTIONS = 24
CAP_SHARES = (1.0, 0.98, 0.95, 0.9, 0.8)


@dataclass(frozen=True)
class Dealing:
    """Each member's groups, in the order in which it begins them, and when it has decoded them."""

    groups: list[list[int]]
    ends_s: list[float]

    @property
    def makespan_s(self) -> float:
        return max(self.ends_s)


@dataclass(frozen=True)
class Work:
    """The groups of an iteration that are to be dealt.

    lengths: expected lengths of all groups of the iteration, [groups, num_generations] tokens. order: the numbers of
    the groups to deal, longest first. keep_order: a member begins its groups in the order of their numbers, not in
    `order`.
    """

    lengths: Lengths
    order: tuple[int, ...]
    keep_order: bool

    @property
    def responses(self) -> int:
        return len(self.order) * int(self.lengths.shape[1])

    @cached_property
    def tokens(self) -> list[float]:
        """Tokens of each group, by number."""
        return [float(tokens) for tokens in self.lengths.sum(axis=1)]

    @cached_property
    def _place(self) -> dict[int, int]:
        return {group: place for place, group in enumerate(self.order)}

    @cached_property
    def tokens_per_group(self) -> float:
        return math.fsum(self.tokens[group] for group in self.order) / len(self.order)

    def begun(self, groups: Sequence[int]) -> list[int]:
        """A member's groups in the order in which it begins them."""
        return sorted(groups) if self.keep_order else sorted(groups, key=self._place.__getitem__)

    def timed(self, dealt: Sequence[Sequence[int]], members: Sequence[Member]) -> Dealing:
        groups = [self.begun(part) for part in dealt]
        return Dealing(groups, ends_s(self.lengths, groups, members))


def in_turn(work: Work, members: Sequence[Member]) -> Dealing:
    """Groups dealt by number, as plan.py deals them when nothing is known about them."""
    ascending = sorted(work.order)
    parts = assign_groups(len(ascending), len(members))
    return work.timed([[ascending[k] for k in part] for part in parts], members)


def longest_first(work: Work, members: Sequence[Member]) -> Dealing:
    """Each next group goes to the member that would be free first if each decoded an even share at once (LPT)."""
    return work.timed(_longest_first(work, members), members)


def _longest_first(work: Work, members: Sequence[Member]) -> list[list[int]]:
    seconds = [_seconds_per_token(member, work.responses / len(members)) for member in members]
    heap = [(member.start_s, place) for place, member in enumerate(members)]
    heapq.heapify(heap)
    dealt: list[list[int]] = [[] for _ in members]
    for group in work.order:
        free_s, place = heap[0]
        dealt[place].append(group)
        heapq.heapreplace(heap, (free_s + work.tokens[group] * seconds[place], place))
    return dealt


def exactly_longest_first(work: Work, members: Sequence[Member]) -> Dealing:
    """Each next group goes to the member that would have decoded it and what it has first, by exact times (LPT)."""
    dealt: list[list[int]] = [[] for _ in members]
    ends = [0.0] * len(members)
    for group in work.order:
        soonest_s, chosen = math.inf, 0
        # With more, a member only ends later: whoever ends later already is not asked.
        for place in sorted(range(len(members)), key=ends.__getitem__):
            if ends[place] >= soonest_s:
                break
            with_it_s = _end_s(work, members[place], [*dealt[place], group])
            if with_it_s < soonest_s:
                soonest_s, chosen = with_it_s, place
        dealt[chosen].append(group)
        ends[chosen] = soonest_s
    return work.timed(dealt, members)


def exchanged(work: Work, members: Sequence[Member], dealing: Dealing) -> Dealing:
    """The dealing after exchanges between the member that ends last and another, while both then end sooner.

    The last member gives up to two groups for up to one; at most EXCHANGES times.
    """
    dealt, ends = [list(groups) for groups in dealing.groups], list(dealing.ends_s)
    for _ in range(EXCHANGES):
        if not _exchange(work, members, dealt, ends):
            break
    return work.timed(dealt, members)


def _exchange(work: Work, members: Sequence[Member], dealt: list[list[int]], ends: list[float]) -> bool:
    """Exchange once, in `dealt` and `ends`; False if nothing helps."""
    last = max(range(len(ends)), key=ends.__getitem__)
    for given in chain(combinations(dealt[last], 1), combinations(dealt[last], 2)):
        others = [group for group in dealt[last] if group not in given]
        for place in (place for place in range(len(members)) if place != last):
            for taken in (None, *dealt[place]):
                mine = others if taken is None else [*others, taken]
                theirs = [*given, *(group for group in dealt[place] if group != taken)]
                mine_s = _end_s(work, members[last], mine)
                if mine_s < ends[last] and (theirs_s := _end_s(work, members[place], theirs)) < ends[last]:
                    dealt[last], dealt[place], ends[last], ends[place] = mine, theirs, mine_s, theirs_s
                    return True
    return False


def _end_s(work: Work, member: Member, groups: Sequence[int]) -> float:
    return ends_s(work.lengths, [work.begun(groups)], [member])[0]


def tail_apart(work: Work, members: Sequence[Member]) -> Iterator[Dealing]:
    """For several shares: this share of the groups, the longest, on members of their own; longest first on both sides.

    The number of those members is enumerated with an estimate from the mean of all step times.
    """
    ranked = _by_speed(members)
    batch_max = max(member.responses_max for member in members)
    step_s = np.mean([member.step_time.table(batch_max) for member in members], axis=0)
    shares = TAIL_SHARES if work.responses <= MANY_RESPONSES else TAIL_SHARES_OF_MANY
    tails = {max(1, math.ceil(share * len(work.order))) for share in shares}
    for tail in sorted(tails - {len(work.order)}):
        apart = Work(work.lengths, work.order[:tail], work.keep_order)
        rest = Work(work.lengths, work.order[tail:], work.keep_order)
        takes = np.arange(1, len(members))
        both = [_estimates_s(part, count, step_s) for part, count in ((apart, takes), (rest, takes[::-1]))]
        count = 1 + int(np.argmin(np.maximum(*both)))
        dealt: list[list[int]] = [[] for _ in members]
        for part, places in ((apart, ranked[:count]), (rest, ranked[count:])):
            for place, groups in zip(places, _longest_first(part, [members[p] for p in places]), strict=True):
                dealt[place] = groups
        yield work.timed(dealt, members)


def even_ranges(work: Work, members: Sequence[Member]) -> Dealing:
    """Contiguous ranges of groups, sized by each member's speed, the longest for the fastest."""
    ranked = _by_speed(members)
    speeds = [1 / _seconds_per_token(members[place], work.responses / len(members)) for place in ranked]
    shares = accumulate(speed / sum(speeds) for speed in speeds)
    cuts = [0, *(round(share * len(work.order)) for share in shares)]
    return work.timed(_cut(work, ranked, cuts), members)


def balanced_ranges(work: Work, members: Sequence[Member]) -> Iterator[Dealing]:
    """Contiguous ranges that all members end at about the same time: few of the longest groups for the first member.

    If step times rise linearly, nothing ends earlier, except for what whole groups leave over.
    """
    filler = _Filler(work, members, _by_speed(members))
    for _ in range(FILL_ROUNDS if work.responses <= MANY_RESPONSES else FILL_ROUNDS_OF_MANY):
        dealt = filler.fill(filler.least_s())
        yield dealt
        filler.correct(dealt)


def full_ranges(work: Work, members: Sequence[Member], cap_s: float) -> Iterator[Dealing]:
    """Contiguous ranges of as much as each member ends in `cap_s`; the last members may get none.

    Members are ordered first by the time of a single response, and then by its price, if that order differs.
    """
    ranked = _by_speed(members)
    by_price = sorted(ranked, key=lambda place: members[place].usd_per_h * members[place].step_time.step_s(1))
    for order in (ranked, by_price) if by_price != ranked else (ranked,):
        filler = _Filler(work, members, order)
        for share in CAP_SHARES:
            for _ in range(2):
                dealt = filler.fill(max(share * cap_s, filler.least_s()))
                yield dealt
                filler.correct(dealt)


class _Filler:
    """Fills members in turn with ranges of the sorted groups, by an estimate that exact times correct.

    The estimate is: start + longest response alone + further tokens times a slope, which each member has of its own.
    """

    def __init__(self, work: Work, members: Sequence[Member], ranked_places: Sequence[int]) -> None:
        self._work, self._members, self._ranked = work, members, ranked_places
        ordered = list(work.order)
        self._until = [0.0, *accumulate(work.tokens[group] for group in ordered)]
        from_here: Lengths = np.maximum.accumulate(work.lengths[ordered].max(axis=1)[::-1])[::-1]
        self._longest: list[float] = from_here.tolist()
        ranked = [members[place] for place in self._ranked]
        self._starts = [member.start_s for member in ranked]
        self._alone = [member.step_time.step_s(1) for member in ranked]
        self._slopes = [_seconds_per_token(member, work.responses / len(members)) for member in ranked]

    def fill(self, target_s: float) -> Dealing:
        return self._work.timed(_cut(self._work, self._ranked, self._cuts(target_s)), self._members)

    def least_s(self) -> float:
        """The earliest time by which all groups are decoded, by the estimate."""
        low, high = 0.0, max(self._starts) + self._longest[0] * max(self._alone)
        while self._cuts(high)[-1] < len(self._longest):
            low, high = high, 2 * high
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._cuts(middle)[-1] == len(self._longest) else (middle, high)
        return high

    def correct(self, dealt: Dealing) -> None:
        """Take each member's slope from the exact time of what it was dealt."""
        first = 0
        for k, place in enumerate(self._ranked):
            count = len(dealt.groups[place])
            if count:
                longest = self._longest[first]
                further = self._until[first + count] - self._until[first] - longest
                if further > 0:
                    slope = (dealt.ends_s[place] - self._starts[k] - longest * self._alone[k]) / further
                    # Not too far at once: the slope belongs to the batch that this range makes.
                    self._slopes[k] = min(max(slope, self._slopes[k] / 4), 4 * self._slopes[k])
            first += count

    def _cuts(self, target_s: float) -> list[int]:
        cuts = [0]
        for start_s, alone, slope in zip(self._starts, self._alone, self._slopes, strict=True):
            first = cuts[-1]
            if first < len(self._longest):
                spare_s = target_s - start_s - self._longest[first] * alone
                tokens = self._until[first] + self._longest[first] + spare_s / slope
                cuts.append(max(first, bisect_right(self._until, tokens) - 1) if spare_s >= 0 else first)
            else:
                cuts.append(first)
        return cuts


def _cut(work: Work, ranked: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    dealt: list[list[int]] = [[] for _ in ranked]
    for place, (first, end) in zip(ranked, pairwise(cuts), strict=True):
        dealt[place] = list(work.order[first:end])
    return dealt


def _by_speed(members: Sequence[Member]) -> list[int]:
    """Places of the members, ordered by the time of a single response."""
    return sorted(range(len(members)), key=lambda k: (members[k].step_time.step_s(1), members[k].start_s, k))


def _seconds_per_token(member: Member, responses: float) -> float:
    batch = max(1, min(member.responses_max, math.ceil(responses)))
    return member.step_time.step_s(batch) / batch


def _estimates_s(work: Work, members: npt.NDArray[np.int64], step_s: Lengths) -> Lengths:
    """Estimated seconds of `work` for each of these numbers of members; `step_s` is by batch size."""
    tokens = sum(work.tokens[group] for group in work.order) / members
    longest = float(work.lengths[list(work.order)].max())
    batches = np.clip(-(-work.responses // members), 1, len(step_s) - 1)
    estimates: Lengths = longest * step_s[1] + np.maximum(0.0, tokens - longest) * step_s[batches] / batches
    return estimates
