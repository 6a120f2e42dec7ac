"""The step time of a member by the responses that it holds, some of which wait for tools."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.crew_model.step_time import StepTime
from tasks.crew_model.tool_waits import decoded_together, while_held
from tasks.planning.estimate import Estimator
from tasks.planning.iteration_plan import plan_iteration
from tasks.planning.makespan import member_time_s
from tasks.planning.planned_crew import planned_crew
from tests.planning_requests import CURVE, a_pool, a_request, alike_lengths

CURVES = (StepTime(((1, 0.01),)), StepTime.linear(0.02, 0.0001), CURVE)
waits = st.sampled_from([0.0, 1e-4, 0.003, 0.05, 2.0])


@given(st.sampled_from(CURVES), st.integers(1, 300), waits, st.integers(1, 400))
def test_held_responses_are_decoded_or_wait(curve, places, wait_s, there):
    found, most = while_held(curve, places, wait_s, there)
    assert most >= places
    for held in {1, places, most}:
        together = decoded_together(curve, places, wait_s, held)
        assert 1 <= together <= (places if wait_s else held)
        token_s = found.step_s(held)
        # Never quicker than alone, never slower than if none waited.
        assert curve.step_s(1) + wait_s <= token_s * (1 + 1e-9)
        assert token_s <= (curve.step_s(max(held, places)) + wait_s) * (1 + 1e-9)


def test_without_waiting_nothing_changes():
    assert while_held(CURVE, 64, 0.0, 1000) == (CURVE, 64)
    assert decoded_together(CURVE, 64, 0.0, 48) == 48


@given(st.sampled_from(CURVES), st.integers(1, 100), st.floats(1e-3, 1.0))
def test_a_member_that_holds_all_it_can_decodes_as_fast_as_its_engine(curve, places, wait_s):
    found, most = while_held(curve, places, wait_s, 10**6)
    # As many as are always decoded, but for the last one that does not fit.
    assert found.tokens_per_s(most) == pytest.approx(curve.tokens_per_s(places), rel=2 / min(most, places) + 0.02)


def lived_s(lengths, curve: StepTime, places: int, wait_s: float, turn: int) -> float:
    """When the last of these responses ends in steps; after every `turn` tokens each waits for a tool."""
    now_s, last_s = 0.0, 0.0
    ready = [(0.0, number, length) for number, length in enumerate(lengths)]
    heapq.heapify(ready)
    running: list[tuple[int, int, int]] = []
    while ready or running:
        while ready and ready[0][0] <= now_s and len(running) < places:
            _, number, left = heapq.heappop(ready)
            running.append((number, left, min(left, turn)))
        if not running:
            now_s = ready[0][0]
            continue
        now_s += curve.step_s(len(running))
        stepped, running = [(number, left - 1, in_turn - 1) for number, left, in_turn in running], []
        for number, left, in_turn in stepped:
            if in_turn:
                running.append((number, left, in_turn))
            else:
                last_s = max(last_s, now_s + turn * wait_s)
                if left:
                    heapq.heappush(ready, (now_s + turn * wait_s, number, left))
    return last_s


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(("places", "wait_s"), [(32, 0.002), (32, 0.02), (32, 0.2), (6, 0.02), (6, 0.2)])
def test_it_predicts_a_member_that_is_lived_through(curve, places, wait_s):
    """Within a fifth, where to take long waiting for nothing is off by far."""
    lengths = np.rint(np.random.default_rng(0).lognormal(4.5, 0.5, 48)).astype(int).tolist()
    found, most = while_held(curve, places, wait_s, len(lengths))
    lived = lived_s(lengths, curve, places, wait_s, turn=10)
    assert member_time_s(lengths, found, most) == pytest.approx(lived, rel=0.2)
    if (places, wait_s) == (32, 0.2):
        assert member_time_s(lengths, curve, places) < 0.6 * lived


def test_a_crew_of_more_members_gains_less_if_responses_wait():
    def gain(wait_s: float) -> float:
        request = a_request(a_pool(count_max=8), groups=64, lengths=alike_lengths(64), tool_s_per_token=wait_s)
        estimator = Estimator(request)
        return estimator.estimate((2,), None).rollout_s / estimator.estimate((8,), None).rollout_s

    assert 1.0 < gain(1.0) < gain(0.05) < gain(0.0)


def test_a_plan_says_what_it_knows_of_waiting():
    told = plan_iteration(a_request(a_pool(), tool_s_per_token=0.2))
    [width] = [decision for decision in told.decisions if decision.name == "width"]
    assert width.inputs["tool_s_per_token"] == 0.2
    [width] = [decision for decision in plan_iteration(a_request(a_pool())).decisions if decision.name == "width"]
    assert "tool_s_per_token" not in width.inputs


def test_members_are_dealt_more_than_they_decode_together():
    """The plan's bound stays a number of places, for which more responses are held."""
    busy = a_request(a_pool(count_max=2, responses_max=8), groups=16, tool_s_per_token=0.2)
    crew = planned_crew(busy, (2,), None)
    assert {member.responses_max for member in crew.members} == {64}
    assert all(each.batch_max is None or each.batch_max <= 8 for each in crew.assignments)
    assert planned_crew(a_request(a_pool(responses_max=8)), (2,), None).members[0].responses_max == 8
