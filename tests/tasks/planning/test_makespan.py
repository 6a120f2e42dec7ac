"""The exact time of a member against a simulation step by step, and the bound against every dealing of small cases."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.crew_model.step_time import StepTime
from tasks.planning.capacity import GroupLengths
from tasks.planning.makespan import (
    DispatchMember,
    drawn_lengths,
    ends_s,
    group_ends_s,
    lower_bound_s,
    mean_makespan_s,
    member_time_s,
    response_lengths,
    streamed_s,
)
from tests.property_examples import part_of_examples

CURVES = [
    StepTime.linear(0.02, 0.001),
    StepTime(((1, 0.02), (8, 0.02), (16, 0.05))),
    StepTime(((1, 0.01), (4, 0.08))),
]
COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def a_member(curve: StepTime, responses_max: int = 4, **changes) -> DispatchMember:
    return DispatchMember(pool="a", step_time=curve, responses_max=responses_max, **changes)


def group_lengths(expected, high) -> GroupLengths:
    return GroupLengths("history", np.array(expected, dtype=np.float64), np.array(high, dtype=np.float64))


def stepped_time_s(lengths: list[int], step_time: StepTime, responses_max: int) -> float:
    """Token by token."""
    waiting, running, now_s = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < responses_max:
            running.append(waiting.pop(0))
        now_s += step_time.step_s(len(running))
        running = [left - 1 for left in running if left > 1]
    return now_s


@given(COUNTS, st.integers(1, 12), st.sampled_from(CURVES))
def test_a_members_time_is_that_of_its_steps(lengths, responses_max, curve):
    assert member_time_s(lengths, curve, responses_max) == pytest.approx(stepped_time_s(lengths, curve, responses_max))


@given(COUNTS, st.sampled_from(CURVES))
def test_when_all_fit_it_is_the_identity(lengths, curve):
    descending = [*sorted(lengths, reverse=True), 0]
    identity = sum(curve.step_s(j) * (descending[j - 1] - descending[j]) for j in range(1, len(descending)))
    assert member_time_s(lengths, curve, len(lengths)) == pytest.approx(identity)


@given(COUNTS, st.integers(1, 12), st.sampled_from(CURVES), st.floats(0.01, 100))
def test_scaled_lengths_take_scaled_time(lengths, responses_max, curve, factor):
    scaled = [factor * length for length in lengths]
    time_s = member_time_s(lengths, curve, responses_max)
    assert member_time_s(scaled, curve, responses_max) == pytest.approx(factor * time_s)


@settings(max_examples=part_of_examples(0.7))
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.lists(
        st.tuples(st.sampled_from(CURVES), st.integers(1, 3), st.sampled_from((0.0, 0.1, 5.0))), min_size=1, max_size=3
    ),
)
def test_no_assignment_beats_the_bound(lengths, kinds):
    members = [a_member(curve, slots, start_s=start_s) for curve, slots, start_s in kinds]
    alone = np.array(lengths, dtype=np.float64)[:, None]
    makespans = []
    for owners in product(range(len(members)), repeat=len(lengths)):
        dealt = [[k for k, owner in enumerate(owners) if owner == place] for place in range(len(members))]
        makespans.append(max(ends_s(alone, dealt, members)))
    assert lower_bound_s(alone, members) <= min(makespans) * (1 + 1e-9)


def test_the_bound_is_reached_where_work_divides():
    lengths = np.full((4, 2), 10.0)
    members = [a_member(CURVES[1], 4), a_member(CURVES[1], 4)]
    assert lower_bound_s(lengths, members) == pytest.approx(10 * 0.02)
    one = [a_member(StepTime.linear(0.02, 0.0), 2, start_s=3.0)]
    assert lower_bound_s(lengths, one) == pytest.approx(3.0 + 80 / 2 * 0.02)
    # The second comes too late to help.
    late = [*one, a_member(CURVES[0], 2, start_s=1000.0)]
    assert lower_bound_s(lengths, late) == pytest.approx(3.0 + 80 / 2 * 0.02)


def test_ends_count_the_start_and_who_has_nothing_has_ended():
    members = [a_member(CURVES[0], start_s=5.0), a_member(CURVES[0], start_s=7.0)]
    assert ends_s(np.full((1, 1), 10.0), [[0], []], members) == pytest.approx([5.0 + 10 * 0.021, 0.0])


@given(st.integers(1, 16), st.floats(1, 1e5), st.floats(1, 2.2))
def test_representative_lengths_keep_mean_and_order(count, expected, ratio):
    lengths = response_lengths(group_lengths([expected, 1.0], [expected * ratio, 1.0]), count)
    assert lengths.shape == (2, count)
    assert lengths.mean(axis=1) == pytest.approx([expected, 1.0])
    assert (np.diff(lengths, axis=1) <= 1e-9 * expected).all()


def test_representative_lengths_have_the_high_quantile():
    lengths = response_lengths(group_lengths([1000.0], [2000.0]), 4000)[0]
    assert np.quantile(lengths, 0.9) == pytest.approx(2000.0, rel=0.01)
    assert response_lengths(group_lengths([1000.0], [2000.0]), 4000, 1500.0).max() == 1500.0
    # No log-normal is that wide.
    assert np.isfinite(response_lengths(group_lengths([1.0], [1000.0]), 8)).all()


def test_drawn_lengths_have_mean_quantile_and_a_share_in_common():
    lengths = group_lengths([1000.0] * 4000, [2000.0] * 4000)
    drawn = drawn_lengths(lengths, 4, np.inf, 2)
    assert drawn.shape == (2, 4000, 4)
    assert drawn.mean() == pytest.approx(1000.0, rel=0.03)
    assert np.quantile(drawn, 0.9) == pytest.approx(2000.0, rel=0.03)
    assert np.corrcoef(np.log(drawn[0, :, 0]), np.log(drawn[0, :, 1]))[0, 1] == pytest.approx(0.5, abs=0.05)
    assert (drawn == drawn_lengths(lengths, 4, np.inf, 2)).all()
    assert drawn_lengths(lengths, 4, 3000.0, 2).max() == 3000.0


def test_mean_makespan_is_the_mean_of_each_draws():
    members = [a_member(CURVES[0]), a_member(CURVES[1], 2)]
    drawn = drawn_lengths(group_lengths([10.0, 20.0, 30.0], [15.0, 25.0, 50.0]), 2, np.inf, 5)
    each = [max(ends_s(lengths, [[0, 1], [2]], members)) for lengths in drawn]
    assert mean_makespan_s(drawn, [[0, 1], [2]], members) == pytest.approx(np.mean(each))


@pytest.mark.parametrize(
    ("expected", "high", "found"),
    [
        ([0.0], [1.0], "expected and high 0.0 and 1.0"),
        ([2.0], [1.0], "expected and high 2.0 and 1.0"),
        ([1.0], [np.inf], "1.0 and inf"),
        ([np.nan], [1.0], "nan and 1.0"),
        ([], [], r"shapes \(0,\)"),
        ([1.0, 2.0], [3.0], "one entry per group"),
    ],
)
def test_impossible_lengths_are_refused(expected, high, found):
    with pytest.raises(ValueError, match=found):
        response_lengths(group_lengths(expected, high), 4)


@pytest.mark.parametrize("changes", [{"responses_max": 0}, {"start_s": -1.0}, {"usd_per_h": np.nan}])
def test_impossible_members_are_refused(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}: value .* allowed: at least"):
        a_member(CURVES[0], **changes)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="num_generations: value 0"):
        response_lengths(group_lengths([1.0], [1.0]), 0)
    with pytest.raises(ValueError, match="responses_max: value 0"):
        member_time_s([1.0], CURVES[0], 0)


@given(st.sampled_from(CURVES), st.integers(0, 300))
def test_a_step_is_the_sum_of_what_each_response_adds(curve, batch):
    assert curve.rises(batch).shape == (batch,)
    assert curve.rises(batch).sum() == pytest.approx(curve.step_s(batch))


CURVE = StepTime(((1, 0.5), (4, 0.75), (8, 2.0)))
LENGTHS = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(st.integers(1, 12), min_size=n, max_size=n), min_size=1, max_size=6)
)


def token_by_token(lengths: list[list[int]], slots: int) -> list[float]:
    """Every step decodes one token of each response in flight; a slot that falls free takes the next one."""
    waiting = [(group, tokens) for group, responses in enumerate(lengths) for tokens in responses]
    running: list[list[int]] = []
    ends = [0.0] * len(lengths)
    now_s = 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            group, tokens = waiting.pop(0)
            running.append([group, tokens])
        now_s += CURVE.step_s(len(running))
        for response in running:
            response[1] -= 1
            if not response[1]:
                ends[response[0]] = now_s
        running = [response for response in running if response[1]]
    return ends


@given(LENGTHS, st.integers(1, 8), st.floats(0, 100))
def test_groups_end_as_in_a_simulation_token_by_token(lengths, slots, start_s):
    member = DispatchMember(pool="rollout", step_time=CURVE, responses_max=slots, start_s=start_s)
    found = group_ends_s(np.array(lengths, dtype=float), range(len(lengths)), member)
    assert found == pytest.approx([start_s + end_s for end_s in token_by_token(lengths, slots)])
    flat = np.array(lengths, dtype=float).ravel()
    assert found.max() == pytest.approx(start_s + member_time_s(flat, CURVE, slots))


def test_a_bounded_batch_counts():
    member = DispatchMember(pool="rollout", step_time=CURVE, responses_max=8)
    lengths = np.array([[4.0, 4.0], [4.0, 4.0]])
    assert group_ends_s(lengths, [1, 0], member, 2).tolist() == pytest.approx(token_by_token([[4, 4], [4, 4]], 2))


def test_training_ends_after_the_last_group_or_when_it_was_busy_all_the_time():
    tokens = np.array([1.0, 1.0, 2.0])
    assert streamed_s(np.array([0.0, 0.0, 0.0]), tokens, 8.0) == 8.0
    # The last group, a quarter of the tokens, is all that is left.
    assert streamed_s(np.array([1.0, 100.0, 2.0]), tokens, 8.0) == 102.0
    # All end together: training follows generation.
    assert streamed_s(np.array([50.0, 50.0, 50.0]), tokens, 8.0) == 58.0


def test_training_in_the_order_of_numbers_waits_for_the_first():
    ends, tokens = np.array([50.0, 1.0]), np.array([1.0, 1.0])
    assert streamed_s(ends, tokens, 8.0) == 54.0
    assert streamed_s(ends, tokens, 8.0, np.array([0, 1])) == 58.0
