"""Simulated conversations with tools: they are lived through, and bugs put into how turns are answered are found."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from simulation.judge import live_and_judge
from simulation.simulated_history import STOP_TOKEN, History, Speed, Strike, draw_history
from storage.journal.shard import Finish
from storage.journal.turns import call_id
from storage.records.records import PlanRecord, SamplingParams, SlotPlan
from tasks.sampling.session import claimant
from tasks.sampling.session.holdings import Holdings
from tasks.sampling.session.performer import Performer
from tasks.sampling.session.state import State
from tasks.turns.scripted_environments import Script, ScriptedEnvironments
from tests.judged_histories import DEFAULT_SEEDS, drawn, is_found

pytestmark = pytest.mark.slow


def talking(*, effects=0.0):
    """The default histories with turns, of which at least a share `effects` has side effects."""
    return drawn(lambda history: history.script is not None and history.script.effects_share >= effects)


def test_conversations_are_drawn():
    scripts = [draw_history(seed).script for seed in DEFAULT_SEEDS]
    told = [script for script in scripts if script is not None]
    assert len(told) > 80
    assert {script.effects_share for script in told} == {0.0, 0.5, 1.0}
    assert {script.can_be_rebuilt for script in told} == {True, False}
    assert {script.losses for script in told} == {0, 1}


def test_conversations_are_lived_through_and_are_eventful():
    outcomes = [live_and_judge(history) for history in islice(talking(effects=0.5), 12)]
    counts = sum((outcome.counts for outcome in outcomes), Counter())
    assert [outcome.broken for outcome in outcomes] == [[]] * 12
    for what in ("calls", "calls repeated", "calls unknown", "responses that began again"):
        assert counts[what] > 0, what


def test_a_call_with_side_effects_before_its_turn_is_in_the_journal_is_found(monkeypatch):
    monkeypatch.setattr(ScriptedEnvironments, "waits_for_journal", lambda *_: False)
    assert is_found(talking(effects=1.0), turns=1)


def test_an_environment_that_is_rebuilt_by_making_its_last_call_again_is_found(monkeypatch):
    """The successor of a member knows the answer of the last call, and makes it nevertheless."""
    answered = ScriptedEnvironments._answered

    def replayed(environments, turn, now_s):
        number = len(turn.events)
        if number and (turn.iteration, turn.response) not in environments._kept:
            name = call_id(turn.run_seed, turn.iteration, turn.response, number - 1, 0)
            environments._server.note(turn, name, has_effects=False)
        return answered(environments, turn, now_s)

    monkeypatch.setattr(ScriptedEnvironments, "_answered", replayed)
    assert is_found(talking(), turns=1)


def test_a_call_that_is_not_said_to_be_unknown_is_found(monkeypatch):
    take = Holdings.take

    def sure(holdings, work):
        take(holdings, work)
        if work.response in holdings.acting:
            holdings.acting[work.response].unknown = False

    monkeypatch.setattr(Holdings, "take", sure)
    assert is_found(talking(effects=0.5), turns=1)


def test_an_observation_that_is_not_written_is_found(monkeypatch):
    """The policy goes on after an answer that no reader will find."""
    answer = Holdings.answer

    def unwritten(holdings, given):
        if given.finish is not Finish.RUNNING:
            return answer(holdings, given)
        pending, holdings.pending = holdings.pending, type(holdings.pending)()
        try:
            return answer(holdings, given)
        finally:
            holdings.pending = pending

    monkeypatch.setattr(Holdings, "answer", unwritten)
    assert is_found(talking(), error=1)


def test_a_response_that_is_released_while_its_tool_runs_is_found(monkeypatch):
    """The member releases whatever it is asked for."""

    def hand_over(state):
        asked_for = [response for response in state.asked_for if response in state.holdings.held]
        state.asked_for = set()
        if asked_for:
            state._release(asked_for)

    monkeypatch.setattr(State, "hand_over", hand_over)
    assert is_found(talking(), turns=1)


def taken_in_turn(seed: int) -> History:
    """Two members take the responses from each other again and again, while calls take longer than that.

    One of them freezes every 40 s for longer than its claims last, and all calls together take many times as long, so
    that each of the two soon gets back what it has lost, whichever of them the seed lets freeze.
    """
    history = draw_history(seed, all_come=True, iterations=1)
    plan = PlanRecord(
        iteration=0,
        weight_version=0,
        run_seed=seed,
        num_generations=2,
        prompts_key="prompts",
        first_prompt=0,
        slots=tuple(SlotPlan(slot=slot, pool="rollout", groups=(2 * slot, 2 * slot + 1)) for slot in range(2)),
        sampling=SamplingParams(max_completion_length=40, stop_token_ids=(STOP_TOKEN,)),
        config={},
        created_at_s=0.0,
    )
    return replace(
        history.untroubled,
        plan=plan,
        median_length=4,
        in_flight=8,
        speeds=(Speed(base_s=0.3, plateau=8),) * 2,
        arrivals_s=(0.0, 1.0),
        stays_s=(None, None),
        objective="makespan",
        cut_share=None,
        strikes=tuple(Strike(at_s=20.0 + 40 * number, kind="freeze", duration_s=25.0) for number in range(10)),
        calm_at_s=420.0,
        cold_start_s=(1.0, 2.0),
        flush_interval_s=2.0,
        heartbeat_interval_s=3.0,
        claim_ttl_s=12.0,
        idle_timeout_s=60.0,
        poll_interval_s=4.0,
        script=Script(turns_max=6, answer_tokens_max=2, call_s=150.0, effects_share=0.0, attempts_max=1000),
    )


def test_an_answer_of_a_conversation_that_began_again_meanwhile_is_found(monkeypatch):
    """A member that loses a response keeps its open turn, and has the response again before the answer is there."""
    made = [taken_in_turn(seed) for seed in range(3)]
    assert live_and_judge(made[0]).broken == []
    performed = Performer._engine_action

    def forgets_none(performer, action):
        environments, performer._environments = performer._environments, None
        try:
            if type(action).__name__ == "AbortResponses":
                return performed(performer, action)
        finally:
            performer._environments = environments
        return performed(performer, action)

    monkeypatch.setattr(Performer, "_engine_action", forgets_none)
    # In each of them, whatever is drawn.
    assert is_found(made, error=len(made))


def test_a_turn_that_is_taken_for_answered_after_a_kill_is_found(monkeypatch):
    take = Holdings.take
    monkeypatch.setattr(Holdings, "take", lambda holdings, work: take(holdings, replace(work, owes=False)))
    assert is_found(talking(), error=1)


def taken_from_the_slow(seed: int) -> History:
    """The one member decodes ten times as slowly as the other, which takes running responses of it between calls."""
    history = taken_in_turn(seed)
    sampling = SamplingParams(max_completion_length=60, stop_token_ids=(STOP_TOKEN,))
    return replace(
        history,
        plan=replace(history.plan, num_generations=4, sampling=sampling),
        median_length=8,
        in_flight=16,
        speeds=(Speed(base_s=1.0, plateau=16), Speed(base_s=0.1, plateau=16)),
        strikes=(),
        calm_at_s=0.0,
        script=Script(turns_max=6, answer_tokens_max=2, call_s=20.0, effects_share=0.0, attempts_max=1000),
    )


def test_a_response_that_is_taken_from_the_living_while_its_tool_runs_is_found(monkeypatch):
    """The taker of running responses asks for some whose tools run, and takes them when it gets no answer."""
    made = [taken_from_the_slow(seed) for seed in range(2)]
    assert live_and_judge(made[0]).broken == []
    candidates_of = claimant.candidates_of
    monkeypatch.setattr(claimant, "candidates_of", lambda *given, **_: candidates_of(*given, acting=True))
    # In each of them, whatever is drawn.
    assert is_found(made, turns=len(made))
