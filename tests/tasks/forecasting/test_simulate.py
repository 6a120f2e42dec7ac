"""A simulated run: what goes in comes out, and where the figures can be worked out by hand, they are those."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.records.records import TRAIN_POOL
from tasks.configuration.planning import PlanningConfig
from tasks.crew_model.accounts import PARTS
from tasks.crew_model.events import Stalled
from tasks.forecasting.response_lengths import ResponseLengths
from tasks.forecasting.results import SimulatedRun
from tasks.forecasting.scenario import AvailabilityScenario, Scenario
from tasks.forecasting.simulate import simulate
from tasks.planning.makespan import member_time_s
from tests.simulated_scenarios import a_pool, a_scenario, a_trainer, all_alike, some_lengths

SEEDING = PlanningConfig(seeding="auto")
pytestmark = pytest.mark.usefixtures("short_seeding")
PREFILL_S, PULL_S = 100 / 1e4, 1.0


def check(scenario: Scenario, run: SimulatedRun) -> None:
    """Tokens, seconds and dollars add up in every iteration and pool."""
    work = scenario.work
    assert [each.iteration for each in run.iterations] == list(range(len(run.iterations)))
    for each in run.iterations:
        assert each.tokens >= work.num_responses
        assert each.tokens_decoded == pytest.approx(each.tokens + each.tokens_regenerated, rel=1e-9)
        assert each.tokens_regenerated >= 0
        trainer = each.seconds[TRAIN_POOL]
        assert sum(trainer.values()) == pytest.approx(each.duration_s)
        assert trainer["train"] == pytest.approx(each.train_s)
        assert min(min(parts.values()) for parts in each.seconds.values()) >= -1e-9
        gpu_s = sum(trainer.values()) * scenario.trainer.gpus
        for pool in scenario.pools:
            parts, usd = each.seconds[pool.name], each.usd[pool.name]
            assert set(parts) == set(PARTS)
            for part, duration_s in parts.items():
                assert usd[part] == pytest.approx(duration_s * pool.usd_per_h / 3600)
            gpu_s += sum(parts.values()) * pool.gpus
            assert each.members[pool.name] <= pool.count + 1e-9
        assert each.gpu_s == pytest.approx(gpu_s)
    if len(run.iterations) == work.iterations:
        for pool in scenario.pools:
            booked_s = sum(sum(each.seconds[pool.name].values()) for each in run.iterations)
            assert booked_s == pytest.approx(run.paid_s[pool.name])
    if scenario.pools and all(pool.availability is None and pool.kept for pool in scenario.pools) and run.iterations:
        first, later = run.iterations[0], run.iterations[1:-1]
        for pool in scenario.pools if not scenario.policy.max_staleness else ():
            for each in (first, *later):
                machines, paid_s = each.planned.get(pool.name, 0), sum(each.seconds[pool.name].values())
                if scenario.policy.crew == "standing":
                    # A member that stands stays when a plan deals it nothing.
                    assert paid_s >= machines * each.duration_s * (1 - 1e-9)
                else:
                    assert paid_s == pytest.approx(machines * each.duration_s)


planning = st.builds(
    PlanningConfig,
    seeding=st.sampled_from(["off", "auto"]),
    width=st.sampled_from(["fixed", "cost", "balance"]),
)
gpu_seconds = st.builds(
    PlanningConfig,
    objective=st.just("gpu_seconds"),
    cut_share=st.sampled_from([None, 0.5]),
    seeding=st.sampled_from(["off", "auto"]),
)
availability = st.one_of(
    st.none(),
    st.builds(AvailabilityScenario, process=st.just("aws-v100-us-west-2a"), rate_factor=st.floats(1, 200)),
    st.builds(
        AvailabilityScenario,
        counts=st.lists(st.integers(0, 3), max_size=5).map(
            lambda counts: (*((4.0 * k, count) for k, count in enumerate(counts)), (100.0, 2))
        ),
    ),
)
pools = st.builds(
    a_pool,
    st.integers(1, 4),
    availability=availability,
    start_s=st.sampled_from([0.0, 3.0]),
    process_s=st.sampled_from([0.0, 0.5]),
    kept=st.booleans(),
    responses_max=st.integers(1, 16),
    egress_usd_per_gb=st.just(0.1),
)


@pytest.mark.slow
@given(
    st.lists(pools, min_size=1, max_size=2),
    st.one_of(planning, gpu_seconds),
    st.builds(a_trainer, engines=st.integers(0, 2), process_s=st.sampled_from([0.0, 2.0]), upload_gbps=st.just(20.0)),
    st.fixed_dictionaries(
        {
            "resume": st.sampled_from(["token", "response"]),
            "balance": st.booleans(),
            "streaming": st.booleans(),
            "max_staleness": st.integers(0, 2),
            "seeding_memory": st.booleans(),
            "transfer": st.sampled_from(["pull", "barrier"]),
            "predictor": st.sampled_from(["none", "oracle", "history", "recall"]),
            "claim_ttl_s": st.sampled_from([1.0, 10.0]),
            "weights_delta_bytes": st.sampled_from([None, 1e7]),
        }
    ),
    st.integers(0, 1000),
)
def test_tokens_and_seconds_are_conserved_whatever_happens(pools, planning, trainer, policy, seed):
    named = [replace(pool, name=f"pool-{k}") for k, pool in enumerate(pools)]
    scenario = a_scenario(*named, trainer=trainer, planning=planning, **policy)
    run = simulate(scenario, seed=seed)
    assert run.stopped is None
    assert len(run.iterations) == scenario.work.iterations
    check(scenario, run)


def test_one_seed_one_history():
    pool = a_pool(4, availability=AvailabilityScenario(process="aws-p3", rate_factor=500.0))
    scenario = a_scenario(pool, trainer=a_trainer(engines=2), planning=SEEDING, predictor="recall")
    assert simulate(scenario, seed=5) == simulate(scenario, seed=5)
    assert simulate(scenario, seed=5) != simulate(scenario, seed=6)


def test_one_member_without_losses_takes_the_identity_of_its_step_time():
    scenario = a_scenario(a_pool(1, responses_max=64), generations=1, groups=12, iterations=1)
    run = simulate(scenario, seed=3)
    lengths = sorted(_lengths(scenario, 3), reverse=True)
    decode_s = member_time_s(lengths, scenario.pools[0].step_time, 64)
    found = run.iterations[0]
    assert found.rollout_s == pytest.approx(PULL_S + 12 * PREFILL_S + decode_s)
    assert found.seconds["rollout"]["useful"] == pytest.approx(decode_s)
    assert found.seconds["rollout"]["transfer"] == pytest.approx(PULL_S)
    assert found.tokens == sum(lengths)
    assert found.wait_remote_s + found.rollout_s == pytest.approx(found.duration_s)


def test_colocated_and_without_streaming_is_rollout_and_then_training():
    trainer = a_trainer(engines=1, responses_max=64)
    scenario = a_scenario(trainer=trainer, planning=SEEDING, streaming=False, iterations=2)
    for number, found in enumerate(simulate(scenario, seed=3).iterations):
        lengths = sorted(_lengths(scenario, 3, number), reverse=True)
        rollout_s = 8 * PREFILL_S + member_time_s(lengths, trainer.step_time, 64)
        assert found.rollout_s == found.seeding_s == pytest.approx(rollout_s)
        assert found.train_s == pytest.approx(sum(lengths) * 0.001 + 2.0)
        assert found.duration_s == pytest.approx(found.rollout_s + found.train_s)


def test_twice_the_members_take_half_the_time_where_there_is_no_tail():
    # A step of eight takes as long as one of one, so two waves become one.
    one, two = (
        simulate(a_scenario(a_pool(count, responses_max=8), lengths=all_alike(500), groups=16, generations=1), seed=0)
        for count in (1, 2)
    )
    decode_s = [run.iterations[0].rollout_s - PULL_S for run in (one, two)]
    assert decode_s[1] == pytest.approx(decode_s[0] / 2)
    assert decode_s[1] == pytest.approx(5.0 + 8 * PREFILL_S)


def test_what_is_lost_with_everybody_is_taken_up_when_somebody_comes():
    times = AvailabilityScenario(counts=((0.0, 3), (4.0, 0), (60.0, 3)))
    scenario = a_scenario(a_pool(3, availability=times), iterations=1)
    undisturbed = simulate(replace(scenario, pools=(a_pool(3),)), seed=1).iterations[0]
    found = simulate(scenario, seed=1).iterations[0]
    check(scenario, simulate(scenario, seed=1))
    assert found.losses == {"rollout": 3, TRAIN_POOL: 0}
    assert undisturbed.rollout_s > 4.0
    # Everything was flushed but the last interval; so what is lost is no more than that.
    lost_s = scenario.policy.flush_interval_s + PULL_S + 1.0
    assert 56.0 < found.rollout_s - undisturbed.rollout_s < 56.0 + lost_s
    assert found.tokens_regenerated > 0
    with pytest.raises(Stalled, match="nothing can happen after second 5"):
        simulate(replace(scenario, pools=(a_pool(3, availability=AvailabilityScenario(counts=((0.0, 3), (4.0, 0)))),)),
                 seed=1)  # fmt: skip


def test_beginning_again_from_the_prompt_costs_more():
    pool = a_pool(3, availability=AvailabilityScenario(counts=((0.0, 3), (9.0, 2), (12.0, 3))))
    scenario = a_scenario(pool, lengths=some_lengths(median=600.0), iterations=1, flush_interval_s=1.0)
    by_token, by_response = (
        simulate(replace(scenario, policy=replace(scenario.policy, resume=resume)), seed=2).iterations[0]
        for resume in ("token", "response")
    )
    assert by_response.tokens_regenerated > 3 * by_token.tokens_regenerated > 0
    assert by_response.rollout_s > by_token.rollout_s
    assert by_response.seconds["rollout"]["wasted"] > by_token.seconds["rollout"]["wasted"]


def test_streaming_and_a_step_off_each_save_time():
    base = a_scenario(a_pool(2), iterations=6, streaming=False)
    policies = [
        base.policy,
        replace(base.policy, streaming=True),
        replace(base.policy, streaming=True, max_staleness=1),
    ]
    durations = [simulate(replace(base, policy=policy), seed=0).duration_s for policy in policies]
    assert durations[0] > durations[1] > durations[2]


def test_a_step_off_takes_the_longer_of_generating_and_training():
    scenario = a_scenario(a_pool(2), lengths=all_alike(300), iterations=8, max_staleness=1)
    steady = simulate(scenario, seed=0).iterations[3:-1]
    for each in steady:
        assert each.duration_s == pytest.approx(max(each.rollout_s, each.train_s), rel=0.01)


def test_balancing_helps_when_one_member_has_more_than_the_others():
    pool = a_pool(4, responses_max=4)
    scenario = a_scenario(pool, groups=5, generations=8, lengths=all_alike(4000), iterations=1)
    unbalanced = simulate(replace(scenario, policy=replace(scenario.policy, balance=False)), seed=0).iterations[0]
    balanced = simulate(scenario, seed=0).iterations[0]
    assert unbalanced.moved == 0
    assert balanced.moved > 0
    assert balanced.rollout_s < unbalanced.rollout_s


def test_a_barrier_holds_all_until_the_slowest_has_the_weights():
    pools = (a_pool(2), a_pool(1, name="far", link_gbps=0.8))
    scenario = a_scenario(*pools, iterations=1, planning=PlanningConfig(dispatch="in_turn"))
    pulled, held = (
        simulate(replace(scenario, policy=replace(scenario.policy, transfer=transfer)), seed=0).iterations[0]
        for transfer in ("pull", "barrier")
    )
    assert pulled.seconds["rollout"]["transfer"] == pytest.approx(2 * PULL_S)
    assert held.seconds["rollout"]["transfer"] == pytest.approx(2 * 10.0)


def test_a_member_that_starts_while_another_pulls_waits_at_the_barrier_for_that_one_only():
    pools = (a_pool(1, process_s=5.0), a_pool(1, name="far", link_gbps=0.8, start_s=3.0))
    scenario = a_scenario(*pools, iterations=1, planning=PlanningConfig(dispatch="in_turn"))
    held = replace(scenario, policy=replace(scenario.policy, transfer="barrier"))
    # Its own weights are there after a second, the other's from second 3 to 13.
    assert simulate(held, seed=0).iterations[0].seconds["rollout"]["transfer"] == pytest.approx(13.0 - 5.0)


def test_machines_that_are_not_kept_are_paid_for_only_while_they_work():
    kept, released = (
        simulate(a_scenario(a_pool(2, start_s=5.0, kept=kept), iterations=3), seed=0) for kept in (True, False)
    )
    assert [each.seconds["rollout"]["starting"] for each in kept.iterations] == pytest.approx([10.0, 0.0, 0.0])
    assert [each.seconds["rollout"]["starting"] for each in released.iterations] == pytest.approx([10.0] * 3)
    standing = [[each.seconds["rollout"]["standing"] for each in run.iterations] for run in (kept, released)]
    assert min(standing[0][:-1]) > 0.0
    assert standing[1] == [0.0] * 3


def test_while_trained_and_concluded_the_crews_machines_stand():
    scenario = a_scenario(a_pool(2), trainer=a_trainer(control_s=7.0), iterations=3)
    run = simulate(scenario, seed=0)
    check(scenario, run)
    for each in run.iterations:
        after_s = each.duration_s - each.rollout_s
        assert after_s > 7.0
        assert each.seconds["rollout"]["standing"] == pytest.approx(2 * after_s)
        assert each.wait_remote_s == pytest.approx(after_s - 7.0)
        assert each.seconds[TRAIN_POOL]["standing"] == 7.0
        standing_usd = 7.0 * 36 / 3600 + 2 * after_s * 3.6 / 3600
        assert each.usd_reported == pytest.approx(each.usd_total - standing_usd)
    without = simulate(replace(scenario, trainer=a_trainer()), seed=0)
    assert run.duration_s == pytest.approx(without.duration_s + 3 * 7.0)
    assert [each.train_s for each in run.iterations] == pytest.approx([each.train_s for each in without.iterations])


def test_no_heartbeat_is_written_when_everything_has_been_generated():
    short, long = (
        simulate(a_scenario(a_pool(2), trainer=a_trainer(control_s=s), iterations=2), seed=0) for s in (0.0, 10_000.0)
    )
    for a, b in zip(short.iterations, long.iterations, strict=True):
        assert a.usd["rollout"]["requests"] == pytest.approx(b.usd["rollout"]["requests"], rel=0.05)


def test_a_trainer_whose_turn_comes_after_the_crews_neither_waits_nor_trains_beside_it():
    scenario = a_scenario(a_pool(2), trainer=a_trainer(waits=False))
    for each in simulate(scenario, seed=0).iterations:
        assert each.duration_s == pytest.approx(each.rollout_s + each.tokens * 0.001 + 2.0)
        assert (each.wait_train_s, each.seconds[TRAIN_POOL]["idle"]) == (0.0, 0.0)
        assert each.seconds[TRAIN_POOL]["standing"] == pytest.approx(each.rollout_s)


def test_pools_do_not_lose_their_machines_together():
    losing = {"availability": AvailabilityScenario(process="aws-p3", rate_factor=200.0)}
    scenario = a_scenario(a_pool(4, **losing), a_pool(4, name="other", **losing), groups=64, iterations=4)
    run = simulate(scenario, seed=1)
    here, there = ([each.losses[pool] for each in run.iterations] for pool in ("rollout", "other"))
    assert sum(here) > 0
    assert sum(there) > 0
    assert here != there


def test_a_trainer_that_takes_groups_in_order_waits_for_the_first():
    trainer = a_trainer(train_fixed_s=0.0, train_s_per_token=1e-3)
    scenario = a_scenario(a_pool(2), trainer=trainer, groups=16, iterations=1, lengths=some_lengths(sigma=1.2))
    (ended,) = simulate(scenario, seed=2).iterations
    (ordered,) = simulate(replace(scenario, policy=replace(scenario.policy, in_order=True)), seed=2).iterations
    check(scenario, simulate(replace(scenario, policy=replace(scenario.policy, in_order=True)), seed=2))
    assert ordered.rollout_s == pytest.approx(ended.rollout_s)
    assert ordered.wait_train_s > ended.wait_train_s
    assert ordered.train_s == pytest.approx(ended.train_s)


def test_who_has_ended_its_work_leaves_when_machine_time_counts():
    planning = PlanningConfig(objective="gpu_seconds")
    scenario = a_scenario(a_pool(4, kept=False), groups=16, iterations=2, predictor="oracle")
    early = simulate(replace(scenario, policy=replace(scenario.policy, planning=planning)), seed=0)
    assert early.gpu_seconds < simulate(scenario, seed=0).gpu_seconds
    cutting = replace(planning, cut_share=0.5)
    cut = simulate(replace(scenario, policy=replace(scenario.policy, planning=cutting, predictor="none")), seed=0)
    assert sum(each.moved for each in cut.iterations) > 0
    check(scenario, cut)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_may_leave_early_stays_until_the_trainer_has_handed_on(seed):
    """Else nobody would go on with what it had begun when it began to train."""
    planning = PlanningConfig(objective="gpu_seconds", cut_share=0.5, seeding="auto")
    scenario = a_scenario(
        a_pool(3), trainer=a_trainer(engines=2), groups=12, planning=planning, max_staleness=1, predictor="recall"
    )
    assert len(simulate(scenario, seed=seed).iterations) == 3


def test_a_run_ends_with_its_budget_or_with_its_time():
    scenario = a_scenario(a_pool(2), iterations=50)
    whole = simulate(replace(scenario, work=replace(scenario.work, iterations=4)), seed=0)
    planning = PlanningConfig(usd_per_run_max=whole.usd)
    bounded = simulate(replace(scenario, policy=replace(scenario.policy, planning=planning)), seed=0)
    assert bounded.stopped is not None
    assert "usd_per_run_max" in bounded.stopped
    assert 1 <= len(bounded.iterations) <= 6
    timed = simulate(scenario, seed=0, span_s=whole.duration_s - 1.0)
    assert timed.iterations == whole.iterations
    assert timed.last(2).tokens == sum(each.tokens for each in whole.iterations[-2:])


def test_requests_and_egress_are_paid_for():
    scenario = a_scenario(a_pool(2, egress_usd_per_gb=0.1), iterations=1)
    usd = simulate(scenario, seed=0).iterations[0].usd["rollout"]
    assert usd["egress"] == pytest.approx(2 * 0.1, rel=1e-3)
    assert 0 < usd["requests"] < usd["useful"]


def _lengths(scenario: Scenario, seed: int, iteration: int = 0) -> list[int]:
    return ResponseLengths(scenario.work, seed).lengths(iteration).ravel().tolist()
