"""Responses that wait for tools in a simulated run: what it costs, worked out by hand, and bugs that are found."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from storage.records.forecast_records import ForecastInput
from storage.records.records import TRAIN_POOL
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.run_config import parse
from tasks.crew_model.crew_member import ModelMember
from tasks.crew_model.events import Stalled
from tasks.forecasting.inputs import gather
from tasks.forecasting.probe import NoProbe, Probe, ToolProbe
from tasks.forecasting.results import SimulatedRun
from tasks.forecasting.scenario import AvailabilityScenario, Scenario, ToolsScenario
from tasks.forecasting.simulate import simulate
from tests.forecast_documents import document
from tests.simulated_scenarios import STEP_S, a_pool, a_scenario, a_trainer, all_alike
from tests.tasks.forecasting.test_inputs import UNPROBED
from tests.tasks.forecasting.test_inputs import probe as a_probe
from tests.tasks.forecasting.test_simulate import SEEDING, check, pools

# Every response gets exactly one answer, after 20 s.
ONCE = ToolsScenario(answers=100.0, answers_max=1, answer_s=20.0, sigma=0.0, observation_tokens=500)
PULL_S, PREFILL_S, OBSERVATION_S, TOKEN_S = 1.0, 100 / 1e4, 500 / 1e4, 0.01

pytestmark = pytest.mark.usefixtures("short_seeding")


def with_tools(scenario: Scenario, tools: ToolsScenario | None = ONCE) -> Scenario:
    return replace(scenario, work=replace(scenario.work, tools=tools))


def in_places(responses_max: int, groups: int, **pool) -> Scenario:
    """One member with so many places; every response has 1000 tokens, which alone take 10 s."""
    return with_tools(
        a_scenario(
            a_pool(1, responses_max=responses_max, **pool),
            lengths=all_alike(1000),
            groups=groups,
            generations=1,
            iterations=1,
        )
    )


def judge(scenario: Scenario, run: SimulatedRun) -> None:
    """Everything adds up, and no second counts as decoding in which no token was decoded."""
    check(scenario, run)
    for each in run.iterations:
        decoding_s = sum(parts["useful"] + parts["wasted"] for parts in each.seconds.values())
        assert decoding_s <= each.tokens_decoded * STEP_S[0][1] * (1 + 1e-9)


def test_a_member_that_only_waits_for_an_answer_is_idle():
    scenario = in_places(1, 1)
    run = simulate(scenario, seed=0)
    judge(scenario, run)
    (found,) = run.iterations
    assert found.rollout_s == pytest.approx(PULL_S + PREFILL_S + 1000 * TOKEN_S + 20.0 + OBSERVATION_S)
    parts = found.seconds["rollout"]
    assert parts["useful"] == pytest.approx(1000 * TOKEN_S)
    # The prompt and the observation; the engine still has what was decoded before.
    assert parts["prefill"] == pytest.approx(PREFILL_S + OBSERVATION_S)
    assert parts["idle"] == pytest.approx(20.0)
    assert (found.prefill_tokens, found.tokens_decoded) == (600, 1000)


def only_decodes(run: SimulatedRun) -> None:
    """Eight responses of 10 s in one place: while any waits 20 s for its answer, the others are decoded."""
    parts = run.iterations[0].seconds["rollout"]
    assert parts["useful"] == pytest.approx(8 * 1000 * TOKEN_S)
    assert parts["idle"] <= 20.0
    assert run.iterations[0].rollout_s < PULL_S + 8 * (1000 * TOKEN_S + PREFILL_S + OBSERVATION_S) + 20.0


def test_a_response_that_waits_gives_its_place_to_others():
    scenario = in_places(1, 8)
    for seed in range(5):
        run = simulate(scenario, seed=seed)
        judge(scenario, run)
        only_decodes(run)


def test_a_response_that_keeps_its_place_while_it_waits_is_found(monkeypatch: pytest.MonkeyPatch):
    limit = ModelMember.batch_limit.fget
    assert limit is not None
    monkeypatch.setattr(ModelMember, "batch_limit", property(lambda member: limit(member) - len(member.acting)))
    with pytest.raises(AssertionError):
        only_decodes(simulate(in_places(1, 8), seed=0))


def test_waiting_that_counts_as_decoding_is_found(monkeypatch: pytest.MonkeyPatch):
    advance = ModelMember.advance

    def decode_while_it_waits(member: ModelMember, now_s: float) -> None:
        idle_s, is_waiting = member.account.seconds["idle"], bool(member.acting)
        advance(member, now_s)
        if is_waiting:
            member.life.decode_s += member.account.seconds["idle"] - idle_s
            member.account.seconds["idle"] = idle_s

    monkeypatch.setattr(ModelMember, "advance", decode_while_it_waits)
    scenario = in_places(1, 1)
    with pytest.raises(AssertionError):
        judge(scenario, simulate(scenario, seed=0))


def test_an_answer_that_is_owed_by_a_lost_member_is_asked_for_again():
    undisturbed = simulate(in_places(1, 1), seed=0).iterations[0]
    # The turn ends before second 12 and its answer comes 20 s later, so at second 15 it is owed.
    lost = AvailabilityScenario(counts=((0.0, 1), (15.0, 0), (16.0, 1)))
    scenario = in_places(1, 1, availability=lost)
    run = simulate(scenario, seed=0)
    judge(scenario, run)
    (found,) = run.iterations
    assert found.tokens_regenerated == 0
    # From second 16 on: the pull, the whole answer, prompt and prefix again, the observation, and the rest.
    turn_tokens = found.prefill_tokens - 100 - 100 - 500
    assert 0 < turn_tokens < 1000
    again_s = (100 + turn_tokens + 500) / 1e4 + (1000 - turn_tokens) * TOKEN_S
    assert found.rollout_s == pytest.approx(16.0 + PULL_S + 20.0 + again_s)
    assert found.rollout_s > undisturbed.rollout_s
    by_response = replace(scenario, policy=replace(scenario.policy, resume="response"))
    (again,) = simulate(by_response, seed=0).iterations
    judge(by_response, simulate(by_response, seed=0))
    assert again.tokens_regenerated == pytest.approx(turn_tokens)
    assert again.rollout_s == pytest.approx(16.0 + undisturbed.rollout_s)


@pytest.mark.slow
@given(
    st.lists(pools, min_size=1, max_size=2),
    st.builds(a_trainer, engines=st.integers(0, 2), process_s=st.sampled_from([0.0, 2.0])),
    st.builds(
        ToolsScenario,
        answers=st.floats(0, 6),
        answer_s=st.sampled_from([0.0, 0.5, 5.0, 60.0]),
        observation_tokens=st.integers(0, 500),
    ),
    st.fixed_dictionaries(
        {
            "resume": st.sampled_from(["token", "response"]),
            "balance": st.booleans(),
            "crew": st.sampled_from(["iteration", "standing"]),
            "max_staleness": st.integers(0, 2),
            "claim_ttl_s": st.sampled_from([1.0, 10.0]),
        }
    ),
    st.booleans(),
    st.integers(0, 1000),
)
def test_tokens_and_seconds_are_conserved_however_long_tools_take(pools, trainer, tools, policy, early, seed):
    named = [replace(pool, name=f"pool-{k}") for k, pool in enumerate(pools)]
    if policy["resume"] == "response":
        # Machines that are lost every few minutes hardly outlive a whole response with longer answers.
        tools = replace(tools, answer_s=min(tools.answer_s, 0.5))
    planning = SEEDING if trainer.engines else PlanningConfig()
    if early and policy["crew"] == "iteration":
        planning = PlanningConfig(objective="gpu_seconds", cut_share=0.5)
    scenario = with_tools(a_scenario(*named, trainer=trainer, planning=planning, **policy), tools)
    try:
        run = simulate(scenario, seed=seed)
    except Stalled:
        # Machines that are lost faster than tools answer never end a response.
        if all(pool.availability is None for pool in pools):
            raise
        reject()
    assert len(run.iterations) == scenario.work.iterations
    judge(scenario, run)
    assert run == simulate(scenario, seed=seed)


@given(st.lists(pools, min_size=1, max_size=2), st.sampled_from(["iteration", "standing"]), st.integers(0, 1000))
def test_tools_that_never_answer_change_nothing(pools, crew, seed):
    named = [replace(pool, name=f"pool-{k}") for k, pool in enumerate(pools)]
    scenario = a_scenario(*named, iterations=2, crew=crew)
    never = with_tools(scenario, replace(ONCE, answers=0.0))
    assert simulate(never, seed=seed) == simulate(scenario, seed=seed)


def test_tools_make_an_iteration_longer_and_not_the_trainings_tokens():
    scenario = a_scenario(a_pool(2), trainer=a_trainer(engines=1), planning=SEEDING, iterations=2)
    tools = ToolsScenario(answers=2.0, answer_s=10.0, observation_tokens=50)
    plain, waiting = simulate(scenario, seed=1), simulate(with_tools(scenario, tools), seed=1)
    judge(with_tools(scenario, tools), waiting)
    assert [each.tokens for each in plain.iterations] == [each.tokens for each in waiting.iterations]
    assert waiting.duration_s > plain.duration_s + 10.0
    for each in waiting.iterations:
        assert each.seconds[TRAIN_POOL]["train"] == pytest.approx(each.train_s)


def tools_of(probed: Probe | NoProbe, **sections: Any) -> tuple[ToolsScenario | None, list[ForecastInput]]:
    inputs = gather(parse(document(**sections)), probed)
    return inputs.work.tools, [each for each in inputs.shown if each.name == "tools"]


def test_tools_answer_as_was_measured_and_without_that_at_once():
    turns = {"tools": ["examples.any:tool"], "turns_max": 7}
    measured = a_probe(tools=ToolProbe(answers=1.5, answer_s=0.25))
    assert tools_of(UNPROBED) == (None, [])
    found, shown = tools_of(measured, turns=turns)
    assert found == ToolsScenario(answers=1.5, answers_max=7, answer_s=0.25, observation_tokens=256)
    assert shown[0].source.startswith("measured in runs/a")
    for probed in (UNPROBED, a_probe()):
        found, shown = tools_of(probed, turns=turns)
        assert (found, [each.value for each in shown]) == (None, ["taken to answer at once"])
