"""The trainer's machines where no spot machine is left: when they generate again, until when, and what it costs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from storage.records.records import TRAIN_POOL
from tasks.configuration.planning import PlanningConfig
from tasks.crew_model.events import Stalled
from tasks.forecasting.results import SimulatedIteration
from tasks.forecasting.scenario import AvailabilityScenario, Scenario
from tasks.forecasting.simulate import simulate
from tests.planning_requests import seeding_constants
from tests.simulated_scenarios import a_pool, a_scenario, a_trainer, all_alike

TTL_S, AFTER_S, START_S = 10.0, 20.0, 3.0
# Of a full pull, of a prompt, and of a token while eight or fewer are decoded.
PULL_S, PREFILL_S, TOKEN_S = 1.0, 100 / 1e4, 0.01
NO_WINDOW = PlanningConfig(seeding="auto")


@pytest.fixture(autouse=True)
def _no_window(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No window is worth an engine's start, so there is none at the beginning; the trainer generates after AFTER_S."""
    monkeypatch.setattr("tasks.forecasting.scenario.SEEDING_TTLS", AFTER_S / TTL_S)
    with seeding_constants(0.0, 0.0):
        yield


def one_group_at_a_time(
    *counts: tuple[float, int],
    tokens: int = 2000,
    groups: int = 1,
    iterations: int = 1,
    planning: PlanningConfig = NO_WINDOW,
    **trainer,
) -> Scenario:
    """One member, and one engine of the trainer, which both decode one group of four responses after another."""
    return a_scenario(
        a_pool(1, responses_max=4, availability=AvailabilityScenario(counts=counts)),
        trainer=a_trainer(**({"engines": 1, "responses_max": 4, "process_s": START_S} | trainer)),
        lengths=all_alike(tokens),
        groups=groups,
        iterations=iterations,
        planning=planning,
        claim_ttl_s=TTL_S,
    )


def lived(scenario: Scenario, seed: int = 1) -> SimulatedIteration:
    """The first iteration; its parts add up."""
    first = simulate(scenario, seed=seed).iterations[0]
    parts = first.seconds[TRAIN_POOL]
    assert sum(parts.values()) == pytest.approx(first.duration_s)
    assert min(parts.values()) >= 0.0
    assert parts["train"] == pytest.approx(first.train_s)
    assert first.tokens_decoded == pytest.approx(first.tokens + first.tokens_regenerated)
    return first


def test_they_take_over_at_the_token_when_nobody_has_lived_for_long_enough():
    found = lived(one_group_at_a_time((0.0, 1), (10.0, 0)))
    kept = 100 * (10.0 - PULL_S - PREFILL_S) - found.tokens_regenerated / 4
    takes_up_s = 10.0 + TTL_S + AFTER_S
    prefill_s = (100 + 4 * kept) / 1e4
    assert found.wait_train_s == pytest.approx(takes_up_s)
    assert found.rollout_s == pytest.approx(takes_up_s + START_S + prefill_s + (2000 - kept) * TOKEN_S)
    assert found.seeding_s == pytest.approx(found.rollout_s - takes_up_s)
    assert found.seconds[TRAIN_POOL]["process"] == pytest.approx(START_S)
    assert found.seconds[TRAIN_POOL]["idle"] == pytest.approx(takes_up_s)
    assert found.retrain_s == 0.0


def test_with_seeding_off_they_never_do():
    off = PlanningConfig()
    with pytest.raises(Stalled, match="nothing can happen"):
        simulate(one_group_at_a_time((0.0, 1), (10.0, 0), planning=off), seed=1)
    late = lived(one_group_at_a_time((0.0, 1), (10.0, 0), (5000.0, 1), planning=off))
    assert late.seeding_s == 0.0
    assert late.rollout_s > 5000.0


def test_machines_on_which_no_process_waits_cannot():
    with pytest.raises(Stalled):
        simulate(one_group_at_a_time((0.0, 1), (10.0, 0), waits=False), seed=1)


@pytest.mark.parametrize("seeding_s", [0.0, 5.0, 150.0])
def test_where_nobody_ever_comes_they_do_all_of_it(seeding_s):
    scenario = one_group_at_a_time((0.0, 0), groups=3, iterations=3)
    with seeding_constants(seeding_s, 0.0):
        alone = simulate(replace(scenario, pools=()), seed=1).iterations
        first, *later = simulate(scenario, seed=1).iterations
    # A window that is over goes on; where there was none, nobody was missed before.
    waited_s = 0.0 if seeding_s else AFTER_S
    assert first.wait_train_s == pytest.approx(waited_s)
    assert first.duration_s == pytest.approx(alone[0].duration_s + waited_s)
    assert [each.duration_s for each in later] == pytest.approx([each.duration_s for each in alone[1:]])


def test_a_window_that_nobody_shares_goes_on_until_somebody_claims():
    with seeding_constants(5.0, 0.0):
        found = lived(one_group_at_a_time((12.0, 1), groups=2))
        there = lived(one_group_at_a_time((2.0, 1), groups=2))
    assert found.seeding_s == pytest.approx(12.0)
    assert there.seeding_s == pytest.approx(5.0)


def test_they_hand_over_when_a_member_lives_again():
    found = lived(one_group_at_a_time((0.0, 1), (10.0, 0), (60.0, 1), tokens=4000))
    assert found.seeding_s == pytest.approx(60.0 - 40.0)
    assert found.moved > 0
    # They had come some way; the member goes on at the token.
    assert found.rollout_s < 60.0 + PULL_S + 4000 * TOKEN_S - 15.0


def test_who_comes_in_time_is_waited_for():
    found = lived(one_group_at_a_time((0.0, 1), (10.0, 0), (39.0, 1)))
    assert found.seeding_s == 0.0
    again = lived(one_group_at_a_time((0.0, 1), (10.0, 0), (39.0, 1), (41.0, 0)))
    assert again.wait_train_s == pytest.approx(41.0 + TTL_S + AFTER_S)


def test_an_engine_that_has_not_begun_hands_over_too():
    found = lived(one_group_at_a_time((0.0, 1), (10.0, 0), (42.0, 1)))
    assert found.seeding_s == found.seconds[TRAIN_POOL]["process"] == pytest.approx(2.0)
    # It starts again after the next loss, and what was due for the first start is not done in the second.
    often = lived(one_group_at_a_time((0.0, 1), (10.0, 0), (42.0, 1), (43.0, 0), process_s=40.0))
    assert often.seconds[TRAIN_POOL]["process"] == pytest.approx(2.0 + 40.0)


def test_members_that_come_and_go_make_several_phases():
    times = ((0.0, 1), (10.0, 0), (60.0, 1), (62.0, 0), (150.0, 1), (151.0, 0))
    found = lived(one_group_at_a_time(*times, tokens=20_000))
    first_s, second_s = 60.0 - 40.0, 150.0 - (62.0 + TTL_S + AFTER_S)
    third_s = found.rollout_s - (151.0 + TTL_S + AFTER_S)
    assert third_s > 0
    assert found.seeding_s == pytest.approx(first_s + second_s + third_s)
    assert found.losses["rollout"] == 3


def test_what_was_trained_is_trained_a_second_time():
    """The first group was, of three; the next plan counts its training once."""
    scenario = one_group_at_a_time((0.0, 1), (12.0, 0), (90.0, 1), tokens=1000, groups=3, iterations=2)
    found = lived(scenario)
    assert found.retrain_s == pytest.approx(4 * 1000 * 0.001)
    assert found.train_s == pytest.approx(12_000 * 0.001 + 2.0 + found.retrain_s)
    (decision,) = (d for d in simulate(scenario, seed=1).iterations[1].decisions if d.name == "seeding")
    assert decision.inputs["train_s"] == pytest.approx(12_000 * 0.001 + 2.0)


def test_who_trains_looks_when_the_batch_is_done():
    """The first group is there after about 6 s and takes 100 s; the member is lost at 8 s."""
    found = lived(one_group_at_a_time((0.0, 1), (8.0, 0), tokens=500, groups=2, train_s_per_token=0.05))
    began_s = PULL_S + PREFILL_S + 500 * TOKEN_S
    assert found.wait_train_s == pytest.approx(began_s)
    assert found.rollout_s - found.seeding_s == pytest.approx(began_s + 100.0)
    assert found.retrain_s == pytest.approx(100.0)
    assert found.duration_s == pytest.approx(found.rollout_s + found.retrain_s + 100.0 + 2.0)


def test_the_planner_learns_how_much_they_generated():
    """Else an iteration that they saved looks like little work, for which the next would be planned."""
    scenario = one_group_at_a_time((16.0, 1), tokens=1500, groups=8, iterations=2)
    with seeding_constants(5.0, 0.0):
        first, second = simulate(scenario, seed=1).iterations
    assert first.seeding_s == pytest.approx(16.0)
    (decision,) = (d for d in second.decisions if d.name == "seeding")
    work_s = 8 * 1500 * TOKEN_S
    assert decision.inputs["members_needed"] == pytest.approx(work_s / first.train_s, rel=0.05)


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("engines", [1, 2])
def test_an_outage_costs_an_order_more_without(engines, max_staleness):
    """All members gone for three hours: with the rule little more than the trainer's machines take alone."""
    times = AvailabilityScenario(counts=((0.0, 3), (30.0, 0), (10_800.0, 3)))
    planning = PlanningConfig(seeding="auto")
    trainer = a_trainer(engines=engines, process_s=START_S)
    scenario = a_scenario(
        a_pool(3, availability=times), trainer=trainer, groups=64, planning=planning, max_staleness=max_staleness
    )
    alone = simulate(replace(scenario, pools=()), seed=4)
    seeded = simulate(scenario, seed=4)
    policy = replace(scenario.policy, planning=replace(planning, seeding="off"))
    unseeded = simulate(replace(scenario, policy=policy), seed=4)
    assert max(each.seeding_s for each in seeded.iterations) > AFTER_S
    assert seeded.duration_s < 1.3 * alone.duration_s + TTL_S + AFTER_S + START_S
    assert unseeded.duration_s > 10_800.0 > 10 * seeded.duration_s


def test_machines_that_have_generated_load_the_model_before_they_train():
    def alone(load_s: float) -> SimulatedIteration:
        seeding = PlanningConfig(seeding="auto")
        trainer = a_trainer(engines=1, process_s=START_S, load_s=load_s)
        return lived(a_scenario(trainer=trainer, lengths=all_alike(200), groups=1, planning=seeding))

    quick, slow = alone(0.0), alone(7.0)
    assert slow.duration_s - quick.duration_s == pytest.approx(7.0)
    assert slow.seconds[TRAIN_POOL]["process"] - quick.seconds[TRAIN_POOL]["process"] == pytest.approx(7.0)
    assert slow.wait_train_s == pytest.approx(quick.wait_train_s)


def test_machines_that_wait_load_the_model_meanwhile():
    def beside(load_s: float) -> float:
        scenario = a_scenario(a_pool(1), trainer=a_trainer(load_s=load_s), lengths=all_alike(200), groups=4)
        return lived(scenario).duration_s

    assert beside(1.0) == pytest.approx(beside(0.0))
    assert beside(500.0) > beside(0.0) + 400.0


def test_what_was_trained_since_the_last_checkpoint_is_trained_again_while_the_machines_wait():
    def run(interval: int, *, per_token_s: float) -> list[SimulatedIteration]:
        trainer = a_trainer(train_s_per_token=per_token_s, train_fixed_s=0.0, replay_interval=interval)
        scenario = a_scenario(a_pool(1), trainer=trainer, lengths=all_alike(200), groups=4, iterations=5)
        return list(simulate(scenario, seed=1).iterations)

    each, third = run(1, per_token_s=1e-4), run(3, per_token_s=1e-4)
    once_s = each[0].train_s
    assert [found.retrain_s for found in each] == [0.0] * 5
    assert [found.retrain_s for found in third] == pytest.approx([0.0, once_s, 2 * once_s, 0.0, once_s])
    assert third[1].train_s == pytest.approx(2 * once_s)
    # A short replay is over before the first group is.
    assert sum(found.duration_s for found in third) == pytest.approx(sum(found.duration_s for found in each))
    slow, slower = run(1, per_token_s=1.0), run(3, per_token_s=1.0)
    assert slower[2].duration_s > slow[2].duration_s + 1.5 * slow[0].train_s
