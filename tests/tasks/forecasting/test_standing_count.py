"""Slots of a standing crew: as the guide's figures say, and as many as a simulated budget leaves."""

import random

import pytest

from resources.spot_trace import PROCESSES
from tasks.configuration.run_config import parse
from tasks.forecasting.comparison import forecast
from tasks.forecasting.probe import NoProbe
from tasks.forecasting.scenario import AvailabilityScenario, PoolScenario
from tasks.forecasting.standing_count import share_left, standing_count, standing_pools
from tasks.forecasting.table import forecast_text
from tests.forecast_documents import document
from tests.simulated_scenarios import a_pool


@pytest.mark.parametrize(("losses", "gone"), [(0.0, 0.0), (1.0, 0.019), (2.0, 0.143)])
def test_the_share_that_is_gone_is_the_guides(losses, gone):
    assert 1 - share_left(losses / 4, 4.0) == pytest.approx(gone, abs=5e-4)


def test_so_many_slots_are_left_if_losses_are_drawn_one_by_one():
    rng, left, slots = random.Random(0), 0, 20_000
    for _ in range(slots):
        now_h, losses = rng.expovariate(0.5), 0
        while now_h <= 5.0:
            now_h, losses = now_h + rng.expovariate(0.5), losses + 1
        left += losses <= 3
    assert left / slots == pytest.approx(share_left(0.5, 5.0), abs=0.01)


def test_the_count_leaves_the_members_and_one_fewer_would_not():
    count = standing_count(32, 0.5, 4.0)
    assert count is not None
    assert (count - 1) * share_left(0.5, 4.0) < 32 <= count * share_left(0.5, 4.0)
    assert standing_count(32, 0.0, 100.0) == 32


def test_a_long_execution_is_run_in_parts():
    assert standing_count(8, 0.5, 12.0) is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, 0.5, 1.0), "members"), ((1, -1.0, 1.0), "per_h"), ((1, 1.0, float("inf")), "hours")],
)
def test_impossible_values_are_named(arguments, named):
    with pytest.raises(ValueError, match=f"^{named}: value .*; allowed"):
        standing_count(*arguments)


def a_pool_that_loses(factor: float) -> PoolScenario:
    return a_pool(16, availability=AvailabilityScenario(process="aws-p3", rate_factor=factor))


def test_pools_that_can_lose_machines_are_told_how_many_slots_to_have():
    per_h = PROCESSES["aws-p3"].losses_per_node_h
    (found,) = standing_pools([a_pool_that_loses(1.0), a_pool(4)], 3.0)
    assert (found.members, found.losses_per_h) == (16, pytest.approx(per_h))
    assert found.slots == standing_count(16, per_h, 3.0)
    assert found.share_gone == pytest.approx(1 - share_left(per_h, 3.0))
    # One loss for each slot on average, and one slot in fifty gone.
    assert share_left(per_h, found.part_h) == pytest.approx(0.981, abs=1e-3)
    assert standing_pools([a_pool_that_loses(1.0)], 100.0)[0].slots is None


@pytest.mark.parametrize(
    ("iterations", "process_s", "said"),
    [
        (10, 600.0, "A standing crew of 4 in rollout, at 0.61 losses per machine hour: "),
        (10_000, 600.0, "of its slots are lost for good, so run it in parts of about 1.6 h (--count "),
    ],
)
def test_the_text_of_a_forecast_says_so(iterations, process_s, said):
    figures = {**document()["forecast"], "iterations": iterations, "process_s": process_s, "widths": [4]}
    found = forecast(parse(document(forecast=figures)), NoProbe(reason="not asked"), created_at_s=1.0)
    assert found.snippet["rollout.crew"] == "standing"
    assert said in " ".join(forecast_text(found).split())
    for each in found.setups:
        assert bool(each.standing) == (each.settings["rollout.crew"] == "standing")
