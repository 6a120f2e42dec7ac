"""The judge of width in the 7B example: it compares with the best fixed crew, and finds a planner that is worse."""

from dataclasses import replace

import pytest

from benchmarks.width_choice import WITHIN, weighed
from benchmarks.width_example import Arm, arms, ratios, scenario, weight_of
from tasks.forecasting.simulate import simulate


def test_the_planner_is_compared_with_the_best_fixed_crew():
    run = dict(zip(arms(8, seeds=2, iterations=3), [4.0, 6.0, *[10.0] * 20], strict=False))
    assert ratios(run)[None] == 0.5
    assert {ratio for crew, ratio in ratios(run).items() if crew is not None} == {1.0}


def test_all_crews_draw_their_machines_from_the_same_market():
    planned, fixed = (scenario(Arm(offered=16, fixed=size, seed=0, iterations=5)) for size in (None, 4))
    assert planned.policy.planning.width == "cost"
    assert (planned.pools[0].count, planned.pools[0].places) == (16, None)
    assert (fixed.pools[0].count, fixed.pools[0].places) == (4, 16)
    assert planned.work == fixed.work
    assert planned.pools[0].availability == fixed.pools[0].availability


@pytest.mark.slow
def test_it_finds_a_planner_that_forgets_what_machines_cost():
    chosen, eleven = (Arm(offered=32, fixed=size, seed=0, iterations=10) for size in (None, 11))
    good = weight_of(eleven)
    assert weight_of(chosen) < WITHIN * good
    given = scenario(chosen)
    hasty = replace(given, policy=replace(given.policy, planning=replace(given.policy.planning, cost_weight=0.0)))
    assert weighed(simulate(hasty, seed=0), given.policy.planning.cost_weight) > WITHIN * good
