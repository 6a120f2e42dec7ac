"""The exact time of members for decoding their groups, and a lower bound of every assignment. No IO, no clock.

All responses of a member advance one token per step, so the member's time is the sum of its steps: tau(j) for every
token that j responses decode together, T = sum_j tau(j) (L_j - L_(j+1)) with lengths descending (TailSieve, section
2.1). If more responses wait than a member decodes together, a free slot takes the next response, and the formula holds
for the tokens of each slot. If the trainer takes groups as groups end, an iteration ends at `streamed_s`: members with
equal ends may have no whole group for the trainer until the end.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from tasks.crew_model.step_time import StepTime
from tasks.planning.capacity import GroupLengths
from tasks.planning.log_normal import spread_of

Lengths = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class DispatchMember:
    """A machine that decodes assigned groups. Raises ValueError for impossible values.

    Attributes:
        pool: name of the machine's pool.
        step_time: seconds of a decoding step by the responses decoded together.
        responses_max: most responses that the machine decodes together.
        start_s: seconds until the machine begins to decode.
        usd_per_h: price of the machine; 0: paid in any case.
    """

    pool: str
    step_time: StepTime
    responses_max: int
    start_s: float = 0.0
    usd_per_h: float = 0.0

    def __post_init__(self) -> None:
        if self.responses_max < 1:
            raise ValueError(f"responses_max: value {self.responses_max} of {self.pool}; allowed: at least 1")
        for name in ("start_s", "usd_per_h"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: value {value} of {self.pool}; allowed: at least 0, finite")


def response_lengths(lengths: GroupLengths, num_generations: int, length_max: float = math.inf) -> Lengths:
    """Representative response lengths of each group: [groups, num_generations] tokens, descending.

    The lengths are the midpoints of equal parts of the log-normal with the mean `expected` and the 0.9 quantile `high`,
    scaled to that mean and cut off at length_max. If no log-normal has a quantile so far from the mean, the widest
    log-normal is taken. Raises ValueError for expected lengths not above 0, or above `high`.
    """
    if num_generations < 1:
        raise ValueError(f"num_generations: value {num_generations}; allowed: at least 1")
    normal = NormalDist()
    middles = [normal.inv_cdf((num_generations - k - 0.5) / num_generations) for k in range(num_generations)]
    shape = np.exp(np.multiply.outer(_spread(lengths), middles))
    means: Lengths = shape.mean(axis=1)
    found: Lengths = np.minimum(shape * (lengths.expected / means)[:, None], length_max)
    return found


def drawn_lengths(lengths: GroupLengths, num_generations: int, length_max: float, draws: int) -> Lengths:
    """Random response lengths from the log-normals of `lengths`: [draws, groups, num_generations] tokens, a fixed seed.

    A prediction may misjudge a whole group, so the responses of a group share half of the variance of the logarithm.
    """
    generator = np.random.default_rng(0)
    groups = generator.standard_normal((draws, len(lengths), 1))
    own = generator.standard_normal((draws, len(lengths), num_generations))
    spread = _spread(lengths)[:, None]
    drawn: Lengths = np.exp(spread * (groups + own) / math.sqrt(2) - spread**2 / 2)
    return np.minimum(lengths.expected[:, None] * drawn, length_max)


def _spread(lengths: GroupLengths) -> Lengths:
    """Standard deviation of the logarithm; raises ValueError for impossible lengths."""
    expected, high = lengths.expected, lengths.high
    if not len(expected) or expected.shape != high.shape or expected.ndim != 1:
        raise ValueError(f"lengths: shapes {expected.shape} and {high.shape}; allowed: one entry per group in both")
    # Written so that NaN fails, too.
    wrong = ~((expected > 0) & (high >= expected) & np.isfinite(high))
    if wrong.any():
        found = f"{expected[wrong][0]} and {high[wrong][0]}"
        raise ValueError(f"lengths: expected and high {found}; allowed: expected above 0, high at least that, finite")
    return spread_of(expected, high)


def member_time_s(lengths: Sequence[float] | Lengths, step_time: StepTime, responses_max: int) -> float:
    """Seconds of one member for decoding responses of the given lengths in tokens, in the order of starting.

    At most responses_max responses run at once, and the next starts in the slot of an ended response. Exact for whole
    numbers of tokens.
    """
    if responses_max < 1:
        raise ValueError(f"responses_max: value {responses_max}; allowed: at least 1")
    return float(_times_s(np.asarray(lengths, dtype=np.float64).reshape(1, -1), step_time, responses_max)[0])


def _times_s(tokens: Lengths, step_time: StepTime, responses_max: int) -> Lengths:
    """Seconds for each row of [draws, responses], as in `member_time_s`."""
    if tokens.shape[1] > responses_max:
        tokens = np.array([slot_totals(row, responses_max) for row in tokens.tolist()])
    # Sum by parts: L_j (tau(j) - tau(j - 1)).
    return np.asarray(np.sort(tokens, axis=1)[:, ::-1] @ step_time.rises(tokens.shape[1]))


def slot_totals(tokens: list[float], slots_max: int) -> list[float]:
    """The tokens of each slot if a free slot always takes the next response."""
    slots = tokens[:slots_max]
    heapq.heapify(slots)
    for length in tokens[slots_max:]:
        heapq.heapreplace(slots, slots[0] + length)
    return slots


def ends_s(lengths: Lengths, assigned: Sequence[Sequence[int]], members: Sequence[DispatchMember]) -> list[float]:
    """Seconds until each member has decoded its groups, with the start; 0 for a member without groups.

    Args:
        lengths: response lengths, [groups, num_generations] tokens.
        assigned: each member's groups in the order of beginning.
        members: the members, in the order of `assigned`.
    """
    ends: list[float] = _ends_s(lengths[None], assigned, members)[:, 0].tolist()
    return ends


def mean_makespan_s(drawn: Lengths, assigned: Sequence[Sequence[int]], members: Sequence[DispatchMember]) -> float:
    """Mean seconds until the last member has decoded its groups, over the draws [draws, groups, num_generations]."""
    return float(_ends_s(drawn, assigned, members).max(axis=0).mean())


def _ends_s(drawn: Lengths, assigned: Sequence[Sequence[int]], members: Sequence[DispatchMember]) -> Lengths:
    """The ends of all members in all draws: [members, draws]."""
    ends = np.zeros((len(members), len(drawn)))
    for place, (groups, member) in enumerate(zip(assigned, members, strict=True)):
        if groups:
            tokens = drawn[:, list(groups)].reshape(len(drawn), -1)
            ends[place] = member.start_s + _times_s(tokens, member.step_time, member.responses_max)
    return ends


def lower_bound_s(lengths: Lengths, members: Sequence[DispatchMember]) -> float:
    """Seconds before which no assignment of responses with the given lengths to the given members can end.

    The bound is the larger of two times: the time of all tokens with every member decoding at its best rate from its
    start on, and the time of the longest response alone on the quickest member.
    """
    rates = [_best_tokens_per_s(member) for member in members]
    longest = float(lengths.max())
    alone_s = min(member.start_s + longest * member.step_time.step_s(1) for member in members)
    left, rate, now_s = float(lengths.sum()), 0.0, 0.0
    for start_s, more in sorted((member.start_s, more) for member, more in zip(members, rates, strict=True)):
        done = rate * (start_s - now_s)
        if done >= left:
            break
        left, rate, now_s = left - done, rate + more, start_s
    return max(alone_s, now_s + left / rate)


def _best_tokens_per_s(member: DispatchMember) -> float:
    batches = np.arange(1, member.responses_max + 1)
    return float(np.max(batches / member.step_time.table(member.responses_max)[1:]))


Seconds = npt.NDArray[np.float64]


def group_ends_s(
    lengths: Lengths, groups: Sequence[int], member: DispatchMember, batch_max: int | None = None
) -> Seconds:
    """Seconds until all responses of each group of a member have ended: [len(groups)], in the order of `groups`.

    Args:
        lengths: response lengths of all groups, [groups, num_generations] tokens.
        groups: the member's groups in the order of beginning.
        member: the member.
        batch_max: a bound below member.responses_max on the responses decoded together; None: no such bound.
    """
    tokens = lengths[list(groups)].ravel()
    slots = min(member.responses_max, batch_max or member.responses_max)
    # A response ends when its slot has decoded this many tokens: its own and those before it.
    ends, totals = tokens, np.sort(tokens)
    if len(tokens) > slots:
        ends, totals = _inslot_totals(tokens, slots)
    # Between two ends, all remaining responses decode together.
    steps = np.diff(totals, prepend=0.0) * member.step_time.table(len(totals))[:0:-1]
    at_s = np.interp(ends, np.concatenate([[0.0], totals]), np.concatenate([[0.0], np.cumsum(steps)]))
    return np.asarray(member.start_s + at_s.reshape(len(groups), -1).max(axis=1))


def streamed_s(ends_s: Seconds, tokens: Seconds, train_s: float, order: npt.NDArray[np.intp] | None = None) -> float:
    """Seconds until the end of training, if training takes `train_s` in total.

    Args:
        ends_s: seconds until the last response of each group has ended, [groups].
        tokens: tokens of each group, [groups].
        train_s: seconds of training without waiting.
        order: group numbers in the order of training; None: in the order of `ends_s`.
    """
    order = np.argsort(ends_s, kind="stable") if order is None else order
    left_s = train_s * np.cumsum(tokens[order][::-1])[::-1] / tokens.sum()
    return float((ends_s[order] + left_s).max())


def _inslot_totals(tokens: Seconds, slots: int) -> tuple[Seconds, Seconds]:
    """(tokens of the slot at the end of each response, totals of all slots, ascending); free slots take the next."""
    heap = [0.0] * slots
    ends = np.empty_like(tokens)
    for index, length in enumerate(tokens.tolist()):
        ends[index] = heap[0] + length
        heapq.heapreplace(heap, float(ends[index]))
    return ends, np.sort(np.array(heap))
