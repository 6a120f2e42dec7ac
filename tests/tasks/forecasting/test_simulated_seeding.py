"""Seeding in a simulated run: where there is no tail, it is what the closed form says."""

import pytest

from tasks.configuration.planning import PlanningConfig
from tasks.forecasting.scenario import AvailabilityScenario, Scenario
from tasks.forecasting.simulate import simulate
from tasks.planning.seeding import closed_form_s
from tests.simulated_scenarios import a_pool, a_scenario, a_trainer, all_alike
from tests.tasks.forecasting.test_simulate import PULL_S, SEEDING

pytestmark = pytest.mark.usefixtures("short_seeding")
FLAT = ((4, 0.01),)


def tail_free(members: int, **pool) -> Scenario:
    """256 engine-seconds of work in groups of one second each, training of 60 s, two engines on its machines."""
    engine = {"responses_max": 4, "step_s": FLAT, "prefill_tokens_per_s": 1e9}
    return a_scenario(
        a_pool(members, **engine, **pool),
        trainer=a_trainer(engines=2, train_s_per_token=60 / 102_400, train_fixed_s=0.0, **engine),
        lengths=all_alike(100),
        groups=256,
        iterations=14,
        planning=PlanningConfig(seeding="auto"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_seeding_converges_to_the_closed_form_where_there_is_no_tail(members):
    steady = simulate(tail_free(members), seed=0).iterations[-3:]
    expected_s = closed_form_s(256.0, 60.0, PULL_S, 2, members, 0.5)
    for each in steady:
        assert each.seeding_s == pytest.approx(expected_s, abs=0.5)
        assert each.duration_s == pytest.approx(expected_s + 60.0, abs=2.0)


def test_no_seeding_where_the_crew_keeps_the_trainer_busy():
    assert simulate(tail_free(5), seed=0).iterations[-1].seeding_s == 0.0


def test_seeding_follows_the_members_that_are_there():
    times = AvailabilityScenario(counts=((0.0, 4), (500.0, 1), (1200.0, 4)))
    iterations = simulate(tail_free(4, availability=times), seed=0).iterations
    by_members = {round(each.members["rollout"]): each for each in iterations if each.losses["rollout"] == 0}
    assert set(by_members) >= {1, 4}
    assert by_members[1].duration_s > by_members[4].duration_s + 20.0


@pytest.mark.parametrize("train_s_per_token", [0.00002, 0.0002, 0.001])
@pytest.mark.parametrize("members", [1, 3])
def test_iterations_that_overlap_last_as_long_as_is_planned(members, train_s_per_token):
    """The trainer's machines generate when the iteration before is trained, if the crew has left them anything.

    More responses wait than are decoded together, so that whoever comes later finds work.
    """
    given = a_scenario(
        a_pool(members),
        trainer=a_trainer(engines=1, train_s_per_token=train_s_per_token, train_fixed_s=0.0, control_s=1.0),
        lengths=all_alike(2000),
        groups=48,
        iterations=8,
        max_staleness=1,
        planning=SEEDING,
    )
    last = simulate(given, seed=0).iterations[-2]
    seeding = next(one for one in last.decisions if one.name == "seeding")
    expected_s = seeding.alternatives[seeding.chosen]["timing_s/iteration"]
    assert expected_s == pytest.approx(last.duration_s, rel=0.1)
