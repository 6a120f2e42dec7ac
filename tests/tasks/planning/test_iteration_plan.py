"""Whole plans: nothing lost or doubled, within bounds and budgets, never below what is possible."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.records.records import TRAIN_POOL, SlotPlan
from tasks.crew_model.step_time import NOMINAL
from tasks.planning.capacity import TrainerCapacity
from tasks.planning.division import assign_groups
from tasks.planning.iteration_plan import BudgetExceeded, PlanningRequest, plan_iteration
from tasks.planning.makespan import lower_bound_s
from tasks.planning.width import allowed_usd, choose_width
from tests.planning_requests import CURVE, a_pool, a_request, alike_lengths, requests, some_lengths
from tests.property_examples import part_of_examples

RESERVED = TrainerCapacity(engines=2, usd_per_h=16.0, responses_max=64, step_time=CURVE)


def planned(request: PlanningRequest):
    """The plan, or None where there is nobody, or no money."""
    nobody = request.reserved is None and not any(pool.count_max for pool in request.pools)
    if nobody:
        with pytest.raises(ValueError, match="pools: no member"):
            plan_iteration(request)
        return None
    try:
        return plan_iteration(request)
    except BudgetExceeded:
        assert request.measured
        with pytest.raises(BudgetExceeded, match=r"^usd_per_(iteration|run)_max: .* allowed: at least"):
            plan_iteration(request)
        return None


@pytest.mark.slow
@given(requests())
def test_every_plan_is_whole_within_its_bounds_and_possible(request):
    plan = planned(request)
    if plan is None:
        return
    dealt = [group for slot in plan.slots for group in slot.groups]
    assert sorted(dealt) == list(range(len(request.lengths)))
    assert [slot.slot for slot in plan.slots] == list(range(len(plan.slots)))
    crew = [slot for slot in plan.slots if slot.pool != TRAIN_POOL]
    assert plan.slots[: len(crew)] == tuple(crew)
    counts = Counter(slot.pool for slot in crew)
    for pool in request.pools:
        assert min(pool.count_min, pool.count_max) <= counts[pool.name] <= pool.count_max
        in_pool = [slot for slot in crew if slot.pool == pool.name]
        assert all(slot.batch_max is None or 1 <= slot.batch_max <= pool.responses_max for slot in in_pool)
    if request.keep_order:
        assert all(list(slot.groups) == sorted(slot.groups) for slot in plan.slots)
    choice = choose_width(request)
    if request.measured:
        assert choice.estimate.usd_iteration <= allowed_usd(request)[1] + 1e-12
    bound_s = lower_bound_s(request.responses, choice.crew.members)
    assert choice.crew.makespan_s >= bound_s * (1 - 1e-9)


@pytest.mark.slow
@given(requests())
def test_the_trainers_slots_are_there_exactly_while_it_generates(request):
    plan = planned(request)
    if plan is None:
        return
    trainer = [slot for slot in plan.slots if slot.pool == TRAIN_POOL]
    crew = len(plan.slots) - len(trainer)
    generates = plan.seeding is not None and plan.seeding.seeding_s != 0
    assert len(trainer) == (request.reserved.engines if generates and request.reserved else 0)
    if request.reserved is None or (request.settings.seeding == "off" and crew):
        assert plan.seeding is None
    else:
        assert plan.seeding is not None
        counts = Counter(slot.pool for slot in plan.slots)
        there = sum(pool.expected(counts[pool.name]) for pool in request.pools)
        assert plan.seeding.members == there
        assert plan.seeding.seeding_s is None or there


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.7))
@given(requests())
def test_one_request_has_one_plan(request):
    assert planned(request) == planned(request)


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([CURVE, NOMINAL]), st.booleans())
def test_nothing_known_is_dealt_as_ever(groups, count, step_time, keep_order):
    pool = a_pool(count_max=count, step_time=step_time)
    plan = plan_iteration(a_request(pool, groups=groups, lengths=alike_lengths(groups), keep_order=keep_order))
    dealt = assign_groups(groups, count)
    assert plan.slots == tuple(SlotPlan(slot=k, pool="rollout", groups=dealt[k]) for k in range(count))
    assert plan.seeding is None
    in_turn = a_request(pool, groups=groups, lengths=some_lengths(groups), settings={"dispatch": "in_turn"})
    assert plan_iteration(in_turn).slots == plan.slots


def test_several_pools_stand_one_after_another():
    plan = plan_iteration(a_request(a_pool(count_max=2), a_pool("spot", count_max=3)))
    assert [slot.pool for slot in plan.slots] == ["rollout"] * 2 + ["spot"] * 3


@pytest.mark.parametrize("seeding", ["off", "auto"])
@pytest.mark.parametrize("crew", [(), (a_pool(count_min=0, count_max=0),)])
def test_without_a_crew_the_trainer_generates_until_nothing_is_left(crew, seeding):
    plan = plan_iteration(a_request(*crew, reserved=RESERVED, settings={"seeding": seeding}))
    assert [slot.pool for slot in plan.slots] == [TRAIN_POOL] * 2
    assert plan.seeding is not None
    assert plan.seeding.seeding_s is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pools": ()}, "pools: no member in 0 pools"),
        ({"pools": (a_pool(count_min=0, count_max=0),)}, "pools: no member in 1 pools"),
        ({"pools": (a_pool(count_max=-1),)}, "rollout: 1 to -1 members; allowed: from 0 on"),
        ({"reserved": replace(RESERVED, engines=0)}, "reserved: 0 engines; allowed: at least one, or None"),
        ({"num_generations": 0}, "16 groups of 0; allowed: at least one of each"),
        ({"lengths": alike_lengths(0)}, "0 groups of 4; allowed: at least one of each"),
    ],
)
def test_impossible_requests_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan_iteration(replace(a_request(a_pool()), **changes))


def test_long_groups_are_kept_apart_from_short_ones():
    """Known lengths do better than dealing in turn, by the plan's own reckoning."""
    known, in_turn = (
        choose_width(a_request(a_pool(), groups=32, settings={"dispatch": dispatch}))
        for dispatch in ("auto", "in_turn")
    )
    assert known.crew.makespan_s < in_turn.crew.makespan_s


def test_no_response_is_expected_to_be_longer_than_it_may():
    request = a_request(a_pool(), groups=32)
    shorter = choose_width(replace(request, length_max=700.0)).estimate.rollout_s
    assert shorter < choose_width(request).estimate.rollout_s
