"""What holds of every dispatch, and what it is for: the longest apart, short work together, speed, prices."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.crew_model.step_time import StepTime
from tasks.planning.capacity import GroupLengths
from tasks.planning.dispatch import (
    Dispatch,
    DispatchMember,
    GroupWork,
    balanced_ranges,
    dispatch,
    even_ranges,
    exactly_longest_first,
    full_ranges,
    in_turn,
    longest_first,
)
from tasks.planning.makespan import (
    drawn_lengths,
    ends_s,
    lower_bound_s,
    mean_makespan_s,
    member_time_s,
    response_lengths,
)
from tests.property_examples import part_of_examples

LINEAR = StepTime(((1, 0.02), (64, 0.04)))
FLAT = StepTime(((1, 0.02), (8, 0.02), (32, 0.06)))
STEEP = StepTime(((1, 0.01), (8, 0.2)))
MEMBER = DispatchMember(pool="a", step_time=LINEAR, responses_max=64)


def group_lengths(expected, ratio=1.5) -> GroupLengths:
    means = np.array(expected, dtype=np.float64)
    return GroupLengths("history", means, means * ratio)


MEMBERS = st.lists(
    st.builds(
        lambda curve, slots, start_s, price: replace(
            MEMBER, step_time=curve, responses_max=slots, start_s=start_s, usd_per_h=price
        ),
        st.sampled_from((LINEAR, FLAT, STEEP)),
        st.sampled_from((1, 3, 16, 64)),
        st.sampled_from((0.0, 1.0, 30.0)),
        st.sampled_from((0.0, 1.0, 4.0)),
    ),
    min_size=1,
    max_size=5,
)
LENGTHS = st.lists(st.floats(1, 5000), min_size=1, max_size=24).map(group_lengths)
CASES = {
    "lengths": LENGTHS,
    "num_generations": st.integers(1, 5),
    "members": MEMBERS,
    "objective": st.sampled_from(("makespan", "gpu_seconds")),
    "keep_order": st.booleans(),
}


def long_tailed(seed: int, groups: int = 48, spread: float = 1.0) -> GroupLengths:
    return group_lengths(np.exp(np.random.default_rng(seed).normal(7, spread, groups)))


def all_groups(dispatched: Dispatch) -> list[int]:
    return sorted(group for assignment in dispatched.assignments for group in assignment.groups)


def sorted_work(lengths: GroupLengths, num_generations: int, *, keep_order: bool = False) -> GroupWork:
    order = tuple(np.argsort(-lengths.expected, kind="stable").tolist())
    return GroupWork(response_lengths(lengths, num_generations), order, keep_order)


@given(**CASES)
def test_every_group_is_dealt_once_and_times_are_exact(lengths, num_generations, members, objective, keep_order):
    found = dispatch(lengths, num_generations, members, objective, keep_order=keep_order)
    assert all_groups(found) == list(range(len(lengths)))
    assert len(found.assignments) == len(members)
    responses = response_lengths(lengths, num_generations)
    for assignment, member in zip(found.assignments, members, strict=True):
        groups = list(assignment.groups)
        expected_s = 0.0
        if groups:
            batch = min(member.responses_max, assignment.batch_max or member.responses_max)
            expected_s = member.start_s + member_time_s(responses[groups], member.step_time, batch)
        assert assignment.ends_s == pytest.approx(expected_s)
        assert assignment.batch_max is None or 0 < assignment.batch_max < member.responses_max
        told = lengths.expected[groups].tolist()
        assert groups == sorted(groups) if keep_order else told == sorted(told, reverse=True)
    ends = [assignment.ends_s for assignment in found.assignments]
    assert found.makespan_s == max(ends)
    assert found.machine_s == pytest.approx(sum(ends))
    prices = [member.usd_per_h for member in members]
    assert found.usd == pytest.approx(sum(end_s * price / 3600 for end_s, price in zip(ends, prices, strict=True)))
    assert found.makespan_s >= lower_bound_s(responses, members) * (1 - 1e-9)


@given(lengths=LENGTHS, num_generations=st.integers(1, 5), members=MEMBERS, keep_order=st.booleans())
def test_over_drawn_lengths_no_way_to_deal_ends_sooner_on_average(lengths, num_generations, members, keep_order):
    work = sorted_work(lengths, num_generations, keep_order=keep_order)
    if np.ptp(lengths.expected) == 0 or len(members) == 1:
        return
    found = dispatch(lengths, num_generations, members, "makespan", keep_order=keep_order)
    drawn = drawn_lengths(lengths, num_generations, math.inf, 16)
    mean_s = mean_makespan_s(drawn, [assignment.groups for assignment in found.assignments], members)
    for way in (in_turn, longest_first, exactly_longest_first, balanced_ranges):
        assert mean_s <= mean_makespan_s(drawn, way(work, members).groups, members) * (1 + 1e-9)


@given(lengths=LENGTHS, num_generations=st.integers(1, 5), members=MEMBERS, share=st.sampled_from((0.3, 1.0, 3.0)))
def test_ranges_are_full_and_end_in_time_or_do_not_hold_all(lengths, num_generations, members, share):
    work = sorted_work(lengths, num_generations)
    cap_s = share * even_ranges(work, members).makespan_s
    places = list(range(len(members)))
    found = full_ranges(work, members, places, cap_s)
    if found is None:
        assert cap_s < max(work.end_s(member, work.order) for member in members)
        return
    assert [group for part in found.groups for group in part] == list(work.order)
    assert found.makespan_s <= cap_s
    for part, following, member in zip(found.groups, found.groups[1:], members, strict=False):
        assert not following or work.end_s(member, [*part, following[0]]) > cap_s


@given(lengths=LENGTHS, num_generations=st.integers(1, 5), members=MEMBERS)
def test_balanced_ranges_end_no_later_than_even_ones(lengths, num_generations, members):
    work = sorted_work(lengths, num_generations)
    found = balanced_ranges(work, members)
    assert sorted(group for part in found.groups for group in part) == list(range(len(lengths)))
    assert found.makespan_s <= even_ranges(work, members).makespan_s


def test_of_many_responses_fewer_ways_are_compared_and_every_group_is_dealt():
    lengths = long_tailed(7, groups=2500)
    for objective in ("makespan", "gpu_seconds"):
        found = dispatch(lengths, 8, [replace(MEMBER, responses_max=256)] * 40, objective)
        assert all_groups(found) == list(range(2500))


@given(lengths=LENGTHS, num_generations=st.integers(1, 5), members=MEMBERS)
def test_machine_time_is_no_more_than_of_even_ranges_nor_later(lengths, num_generations, members):
    members = [replace(member, usd_per_h=0.0) for member in members]
    found = dispatch(lengths, num_generations, members, "gpu_seconds")
    if np.ptp(lengths.expected) == 0:
        return
    even = even_ranges(sorted_work(lengths, num_generations), members)
    assert found.machine_s <= sum(even.ends_s) * (1 + 1e-9)
    assert found.makespan_s <= even.makespan_s * (1 + 1e-9)


@settings(max_examples=part_of_examples(0.5))
@given(
    lengths=LENGTHS,
    members=st.integers(1, 5),
    objective=st.sampled_from(("makespan", "gpu_seconds")),
    factor=st.sampled_from((0.25, 2.0, 1024.0)),
)
def test_scaled_lengths_scale_all_times(lengths, members, objective, factor):
    scaled = GroupLengths("history", lengths.expected * factor, lengths.high * factor)
    before, after = (dispatch(each, 4, [MEMBER] * members, objective) for each in (lengths, scaled))
    assert after.makespan_s == pytest.approx(factor * before.makespan_s)
    assert after.machine_s == pytest.approx(factor * before.machine_s)


def test_the_longest_are_apart_and_decode_fewer_together():
    lengths = group_lengths([20_000.0, 18_000.0] + [1500.0] * 62, ratio=1.1)
    found = dispatch(lengths, 8, [replace(MEMBER, responses_max=256)] * 4, "makespan")
    apart = next(assignment for assignment in found.assignments if 0 in assignment.groups)
    assert len(apart.groups) < 8
    assert apart.batch_max == 8 * len(apart.groups)
    assert [a.batch_max for a in found.assignments].count(None) >= 2
    work = sorted_work(lengths, 8)
    assert found.makespan_s < 0.9 * in_turn(work, [replace(MEMBER, responses_max=256)] * 4).makespan_s


def test_a_batch_that_decodes_no_faster_is_bounded():
    thrashing = replace(MEMBER, step_time=StepTime(((1, 0.02), (8, 0.021), (16, 0.2))), responses_max=16)
    found = dispatch(long_tailed(0, groups=12, spread=0.3), 4, [thrashing] * 2, "makespan")
    assert {assignment.batch_max for assignment in found.assignments} == {8}


def test_isolation_pays_on_the_truth_when_lengths_are_known_and_never_much_less_when_they_are_not():
    wins: dict[float, list[float]] = {0.0: [], 1.5: []}
    members = [replace(MEMBER, responses_max=256)] * 8
    for seed in range(6):
        rng = np.random.default_rng(seed)
        actual = long_tailed(seed, groups=96)
        truth = response_lengths(actual, 8)
        plain_s = in_turn(sorted_work(actual, 8), members).makespan_s
        for noise, ratios in wins.items():
            seen = GroupLengths("x", *(each * np.exp(noise * rng.normal(size=96)) for each in (actual.expected,) * 2))
            told = GroupLengths("x", seen.expected, seen.expected * (1.5 if noise == 0 else 2.2))
            found = dispatch(told, 8, members, "makespan", length_max=float(truth.max()))
            ends = ends_s(truth, [a.groups for a in found.assignments], members)
            ratios.append(max(ends) / plain_s)
    assert np.mean(wins[0.0]) < 0.95
    assert np.mean(wins[0.0]) < np.mean(wins[1.5]) < 1.1


def test_short_work_is_together_so_that_its_members_leave_early():
    lengths = long_tailed(1)
    members = [replace(MEMBER, responses_max=256)] * 6
    found = dispatch(lengths, 8, members, "gpu_seconds")
    # Contiguous ranges: no member's lengths reach into another's.
    spans = sorted(tuple(lengths.expected[[a.groups[-1], a.groups[0]]]) for a in found.assignments if a.groups)
    assert all(high <= low for (_, high), (low, _) in pairwise(spans))
    assert found.machine_s < 0.7 * sum(in_turn(sorted_work(lengths, 8), members).ends_s)


def test_work_goes_where_it_costs_less():
    dear, cheap = (replace(MEMBER, responses_max=256, usd_per_h=price) for price in (9.0, 1.0))
    found = dispatch(long_tailed(2), 8, [dear, cheap, dear, cheap], "gpu_seconds")
    ends = [assignment.ends_s for assignment in found.assignments]
    assert ends[1] + ends[3] > 0.8 * found.machine_s
    # Without a price for each, machine time alone counts.
    free = [replace(member, usd_per_h=price) for member, price in zip([dear] * 2, (0.0, 9.0), strict=True)]
    unpriced = [replace(dear, usd_per_h=0.0)] * 2
    assert dispatch(long_tailed(2), 8, free, "gpu_seconds").machine_s == pytest.approx(
        dispatch(long_tailed(2), 8, unpriced, "gpu_seconds").machine_s, rel=0.011
    )


@pytest.mark.parametrize("objective", ["makespan", "gpu_seconds"])
def test_groups_that_are_alike_are_dealt_evenly_and_by_speed(objective):
    alike = group_lengths([1000.0] * 30)
    found = dispatch(alike, 4, [MEMBER] * 4, objective)
    assert [assignment.groups for assignment in found.assignments] == [tuple(range(k, 30, 4)) for k in range(4)]
    assert [assignment.batch_max for assignment in found.assignments] == [None] * 4
    few = replace(MEMBER, responses_max=8)
    slow = replace(few, step_time=LINEAR.scaled(2.0))
    found = dispatch(alike, 4, [few, slow, few], objective)
    assert [len(a.groups) for a in found.assignments] == [pytest.approx(count, abs=1) for count in (12, 6, 12)]
    assert found.makespan_s < 1.05 * max(
        ends_s(response_lengths(alike, 4), [range(12), range(6), range(12)], [few, slow, few])
    )


def test_fewer_groups_than_members_leave_some_without_work():
    found = dispatch(group_lengths([100.0, 200.0]), 4, [MEMBER] * 5, "makespan")
    assert sorted(len(assignment.groups) for assignment in found.assignments) == [0, 0, 0, 1, 1]
    assert [a.ends_s for a in found.assignments if not a.groups] == [0.0] * 3


def test_who_starts_late_gets_less():
    late = replace(MEMBER, start_s=40.0)
    found = dispatch(long_tailed(3, spread=0.2), 8, [MEMBER, late], "makespan")
    assert 0 < len(found.assignments[1].groups) < len(found.assignments[0].groups)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="members: none given; allowed: at least one"):
        dispatch(group_lengths([1.0]), 4, [], "makespan")
    with pytest.raises(ValueError, match="num_generations: value 0"):
        dispatch(group_lengths([1.0]), 0, [MEMBER], "makespan")
