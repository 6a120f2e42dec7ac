"""The work-conserving bound: worked out by hand, exceeded by no arm, and exceeded by work that is counted twice."""

from dataclasses import replace

import pytest

from benchmarks.seeds import __main__ as seeds
from benchmarks.seeds import rlboost
from benchmarks.seeds.arms import Arm, Outcomes, run, run_all, with_work
from benchmarks.seeds.work_bound import work_bound
from tasks.forecasting.scenario import AvailabilityScenario
from tasks.forecasting.simulate import simulate
from tests.simulated_scenarios import a_pool, a_scenario, a_trainer, all_alike

ROUNDING = 1e-9


def test_the_bound_is_all_work_over_all_gpus_that_are_there():
    # One machine for ten seconds, two from then on; 32 responses of 300 tokens, decoded 16 at a time at best.
    there = AvailabilityScenario(counts=((0.0, 1), (10.0, 2)))
    scenario = a_scenario(a_pool(2, gpus=2, availability=there), lengths=all_alike(300), iterations=2)
    lived = simulate(scenario, seed=1)
    bound = work_bound(scenario, lived, seed=1)
    step_s = scenario.pools[0].step_time.step_s(16)
    tokens, prompts = 2 * 32 * 300, 2 * 8 * 100
    assert lived.tokens == tokens
    training_s = tokens * 0.001 + 2 * 2.0
    assert bound.train_s == pytest.approx(training_s)
    assert bound.needed_gpu_s == pytest.approx(
        tokens * min(0.01 / 8, step_s / 16) * 2 + prompts * 2 / 1e4 + training_s * 8
    )
    assert bound.there_gpu_s == pytest.approx(lived.duration_s * 8 + 2 * (10 + 2 * (lived.duration_s - 10)))
    assert bound.least_s == pytest.approx(max(training_s, lived.duration_s * bound.needed_gpu_s / bound.there_gpu_s))


def test_of_more_places_than_a_pool_may_take_only_so_many_count():
    """The machines are those of the trace over all places, of which the pool has at most two at a time."""
    there = AvailabilityScenario(counts=((0.0, 1), (10.0, 5)))
    scenario = a_scenario(a_pool(2, places=6, gpus=2, availability=there), lengths=all_alike(300), iterations=2)
    lived = simulate(scenario, seed=1)
    bound = work_bound(scenario, lived, seed=1)
    assert bound.there_gpu_s == pytest.approx(lived.duration_s * 8 + 2 * (10 + 2 * (lived.duration_s - 10)))
    # Another number of places is another draw of the trace; the bound looks at the one that the run had.
    pool = a_pool(2, places=12, availability=AvailabilityScenario(process="aws-p3", rate_factor=300.0))
    for seed in range(5):
        scenario = a_scenario(pool, lengths=all_alike(300), iterations=2)
        lived = simulate(scenario, seed=seed)
        bound = work_bound(scenario, lived, seed=seed)
        assert sum(lived.paid_s.values()) <= bound.there_gpu_s - lived.duration_s * 8 + 1e-6


def test_training_binds_where_rollout_does_not():
    scenario = a_scenario(a_pool(4), trainer=a_trainer(train_s_per_token=0.1), lengths=all_alike(200))
    bound = work_bound(scenario, simulate(scenario, seed=1), seed=1)
    assert bound.least_s == bound.train_s
    assert 0.8 < bound.reached <= 1


@pytest.mark.slow
def test_no_arm_exceeds_the_bound():
    """Every arm of every paper with a sixteenth of its prompts, which changes neither machines nor policy."""
    for arms in (paper.arms(None) for paper in seeds.PAPERS.values() if paper.arms(None)):
        got = run_all({name: small(arm) for name, arm in arms.items()}, (1,), 0)
        assert greatest(got, list(arms)) <= 1 + ROUNDING


def test_work_that_is_counted_twice_is_found():
    """A simulator that says that it has trained twice what was decoded seems to exceed what the GPUs can do."""
    six = rlboost.arms(None)["six"]
    arm = replace(six, scenario=with_work(six.scenario, iterations=2), settle=0)
    lived = simulate(arm.scenario, seed=1)
    true = work_bound(arm.scenario, lived, seed=1)
    assert 0.5 < true.reached <= 1
    twice = replace(lived, iterations=tuple(replace(each, tokens=2 * each.tokens) for each in lived.iterations))
    assert work_bound(arm.scenario, twice, seed=1).reached > 1
    outcome = run(arm, 1)
    wrong = Outcomes({"six": [replace(outcome, reached=work_bound(arm.scenario, twice, seed=1).reached)]})
    rows = seeds.bounds("RLBoost", wrong, ["six"])
    assert [row.verdict for row in rows] == ["", "missed"]
    assert [row.verdict for row in seeds.bounds("RLBoost", Outcomes({"six": [outcome]}), ["six"])] == ["", "reached"]


def greatest(got: Outcomes, arms: list[str]) -> float:
    """The greatest share of the bound that any arm reaches, as the benchmark prints it."""
    return seeds.bounds("paper", got, arms)[-1].ours


def small(arm: Arm) -> Arm:
    work = arm.scenario.work
    prompts = max(8, work.num_prompts_per_step // 16)
    dataset = None if work.prompts_in_dataset is None else 4 * prompts
    iterations = min(6, work.iterations)
    changed = with_work(arm.scenario, num_prompts_per_step=prompts, prompts_in_dataset=dataset, iterations=iterations)
    return replace(arm, scenario=changed, span_s=None, settle=min(arm.settle, iterations - 1))
