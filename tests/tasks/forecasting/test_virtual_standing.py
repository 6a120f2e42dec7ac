"""A standing crew in the simulator, in scenarios whose figures can be worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.configuration.planning import PlanningConfig
from tasks.forecasting.results import SimulatedRun
from tasks.forecasting.scenario import AvailabilityScenario, Scenario
from tasks.forecasting.simulate import simulate
from tests.simulated_scenarios import a_pool, a_scenario, a_trainer, all_alike, some_lengths
from tests.tasks.forecasting.test_simulate import SEEDING, check, pools

pytestmark = pytest.mark.usefixtures("short_seeding")


def spent_s(run: SimulatedRun, part: str) -> float:
    return sum(each.seconds["rollout"][part] for each in run.iterations)


def both(scenario: Scenario) -> tuple[SimulatedRun, SimulatedRun]:
    """The scenario with a crew for each iteration, and with a standing one."""
    policies = [replace(scenario.policy, crew=crew) for crew in ("iteration", "standing")]
    of_each, standing = (simulate(replace(scenario, policy=policy), seed=3) for policy in policies)
    return of_each, standing


def test_a_standing_member_starts_once_and_pulls_differences():
    pool = a_pool(2, start_s=3.0, process_s=5.0)
    of_each, standing = both(a_scenario(pool, iterations=4, weights_delta_bytes=1e8))
    assert (spent_s(of_each, "process"), spent_s(standing, "process")) == pytest.approx((2 * 4 * 5.0, 2 * 5.0))
    assert spent_s(standing, "starting") == pytest.approx(2 * 3.0)
    # A whole version takes 1 s, beside the start. Differences of a tenth follow three trainings.
    assert spent_s(standing, "transfer") == pytest.approx(2 * 3 * 0.1)
    assert spent_s(of_each, "transfer") == 0.0
    assert standing.duration_s == pytest.approx(of_each.duration_s - 3 * (5.0 - 0.1))


@pytest.mark.parametrize("crew", ["iteration", "standing"])
@pytest.mark.parametrize(("process_s", "later_s"), [(0.0, 0.0), (0.4, 0.0), (1.0, 0.0), (3.0, 2.0)])
def test_weights_are_pulled_while_the_first_process_starts(crew, process_s, later_s):
    """A pull takes a second, so a process that starts in less delays nothing; the sum of both would."""
    first, started = (
        simulate(a_scenario(a_pool(2, process_s=start_s), iterations=1, crew=crew), seed=3)
        for start_s in (0.0, process_s)
    )
    assert started.duration_s == pytest.approx(first.duration_s + later_s)
    assert spent_s(started, "process") == pytest.approx(2 * process_s)
    assert spent_s(started, "transfer") == pytest.approx(2 * max(0.0, 1.0 - process_s))
    assert sum(started.paid_s.values()) == pytest.approx(sum(started.iterations[0].seconds["rollout"].values()))


def test_a_new_machine_starts_a_process_and_pulls_everything():
    losing = AvailabilityScenario(counts=((0.0, 2), (20.0, 1), (21.0, 2)))
    scenario = a_scenario(a_pool(2, start_s=3.0, process_s=5.0, availability=losing), iterations=6, crew="standing")
    run = simulate(scenario, seed=3)
    assert sum(each.losses["rollout"] for each in run.iterations) == 1
    assert spent_s(run, "starting") == pytest.approx(3 * 3.0)
    assert spent_s(run, "process") == pytest.approx(3 * 5.0)


def test_standing_by_is_paid_for_as_idle_time():
    scenario = a_scenario(a_pool(2), trainer=a_trainer(control_s=50.0), iterations=3, crew="standing")
    run = simulate(scenario, seed=0)
    for each in run.iterations[:-1]:
        # While it is trained and concluded, both members wait.
        waited_s = 2 * (each.duration_s - each.rollout_s)
        assert each.seconds["rollout"]["idle"] + each.seconds["rollout"]["transfer"] >= waited_s > 100.0
        assert each.seconds["rollout"]["standing"] == 0.0
    # The machines go when the last response has ended.
    last = run.iterations[-1]
    assert run.paid_s["rollout"] == pytest.approx(2 * (run.duration_s - last.duration_s + last.rollout_s))


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_members_that_went_on_are_not_missing_at_the_end_of_the_iteration_that_they_left(ahead):
    trainer = a_trainer(train_s_per_token=1e-5, train_fixed_s=0.1)
    scenario = a_scenario(a_pool(8, responses_max=4), trainer=trainer, lengths=some_lengths(sigma=1.0), iterations=10)
    policy = replace(scenario.policy, crew="standing", max_staleness=ahead)
    run = simulate(replace(scenario, policy=policy), seed=0)
    assert [each.members_at_end for each in run.iterations] == [8] * 10


def test_a_member_without_work_goes_on_with_the_next_iteration():
    trainer = a_trainer(train_s_per_token=1e-5, train_fixed_s=0.1)
    scenario = a_scenario(
        a_pool(8, responses_max=4), trainer=trainer, lengths=some_lengths(sigma=1.0), iterations=20, max_staleness=1
    )
    of_each, standing = both(scenario)
    assert standing.tokens == of_each.tokens
    assert standing.duration_s < 0.9 * of_each.duration_s
    assert spent_s(standing, "idle") < spent_s(of_each, "idle") + spent_s(of_each, "standing")


def test_no_more_iterations_are_in_flight_than_are_allowed():
    trainer = a_trainer(train_s_per_token=0.01, train_fixed_s=5.0)
    durations = [
        simulate(
            a_scenario(
                a_pool(2), trainer=trainer, lengths=all_alike(300), iterations=6, crew="standing", max_staleness=ahead
            ),
            seed=0,
        ).duration_s
        for ahead in (0, 1, 2)
    ]
    # Training binds, so that one iteration ahead hides all of the generating and a second one nothing more.
    assert durations[0] > durations[1] + 5.0
    assert durations[1] == pytest.approx(durations[2], rel=0.01)


@pytest.mark.slow
@given(
    st.lists(pools, min_size=1, max_size=2),
    st.builds(a_trainer, engines=st.integers(0, 2), process_s=st.sampled_from([0.0, 2.0]), upload_gbps=st.just(20.0)),
    st.fixed_dictionaries(
        {
            "balance": st.booleans(),
            "streaming": st.booleans(),
            "max_staleness": st.integers(0, 3),
            "predictor": st.sampled_from(["none", "recall"]),
            "claim_ttl_s": st.sampled_from([1.0, 10.0]),
            "weights_delta_bytes": st.sampled_from([None, 1e7]),
        }
    ),
    st.integers(0, 1000),
)
def test_a_standing_crew_conserves_tokens_and_seconds_whatever_happens(pools, trainer, policy, seed):
    named = [replace(pool, name=f"pool-{k}") for k, pool in enumerate(pools)]
    planning = SEEDING if trainer.engines else PlanningConfig()
    scenario = a_scenario(*named, trainer=trainer, planning=planning, iterations=5, crew="standing", **policy)
    run = simulate(scenario, seed=seed)
    assert len(run.iterations) == 5
    check(scenario, run)
