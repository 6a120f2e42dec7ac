"""Agents in real child processes: programs that ask over HTTP, whose conversations go on after a kill."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from resources.process import descendants
from storage.journal.shard import Finish
from storage.journal.turns import call_id
from tasks.turns.first_request import read_opening
from tasks.turns.opened_environments import first_requests
from tasks.turns.testing import LIMIT_S, answered, gathered, record_of
from tasks.turns.tool_schemas import ToolsUnusable
from tests.agent_conversations import ASKED, SEED, called, config, noted, talk, text_of
from tests.agent_functions import ADD
from tests.processes import command, wait_until

pytestmark = pytest.mark.slow
Notes = Callable[[], list[Any]]


@pytest.fixture
def notes(tmp_path, monkeypatch) -> Notes:
    monkeypatch.setenv("AGENT_NOTES", str(tmp_path / "notes"))
    return noted(tmp_path / "notes")


def ended(answer: Any) -> tuple[Finish, tuple[int, ...], float | None]:
    return answer.finish, answer.token_ids, record_of(answer).reward


def test_a_plan_learns_what_the_agent_asks_first(notes):
    columns = [{"prompt": ASKED, "start": start} for start in (3, 4)]
    openings = [read_opening(each) for each in first_requests(config("adds"), columns, [SEED, 7])]
    assert [first.messages for first in openings] == [({"role": "system", "content": "Add."}, *ASKED)] * 2
    assert [first.tools for first in openings] == [(ADD,)] * 2
    assert sorted(notes()) == [["begins", 3, SEED], ["begins", 4, 7]]


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("silent", "sends no request: it ended without one"),
        ("leaves", "sends no request: SystemExit: 3 "),
        ("absent", "cannot be loaded|has no 'absent'"),
    ],
)
def test_an_agent_that_asks_nothing_is_refused(notes, agent, message):
    with pytest.raises(ToolsUnusable, match=rf"^turns\.agent: 'tests\.agent_functions:{agent}'.*({message})") as raised:
        first_requests(config(agent), [{}], [SEED])
    assert "\n" not in str(raised.value)


def test_each_request_is_a_turn_and_what_it_adds_an_observation(notes):
    with talk("adds", {"start": 3}) as conversation:
        notes()
        environments = conversation.environments()
        turn = conversation.said(called((1, 2), (5, 0)))
        first = answered(environments, turn)
        assert text_of(first.token_ids) == (
            "\n<|im_start|>user\n<tool_response>\n6\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert record_of(first).messages == [
            {"role": "tool", "name": "add", "content": "6"},
            {"role": "tool", "name": "add", "content": "8"},
        ]
        assert (record_of(first).turn, record_of(first).rebuilt, record_of(first).reward) == (0, "new", None)
        ids = [f"call_{call_id(11, 2, 0, 0, index)}" for index in (1, 2)]
        assert notes() == [["begins", 3, SEED], [ids[0], {"a": 1, "b": 2}], [ids[1], {"a": 5, "b": 0}]]
        last = answered(environments, conversation.then(turn, first, "eight"))
        assert ended(last) == (Finish.STOP, (), 2.0)
        assert (record_of(last).turn, record_of(last).rebuilt) == (1, "kept")


def test_after_a_kill_the_agent_runs_again_and_is_answered_with_what_is_recorded(notes):
    with talk("adds", {"start": 0}) as conversation:
        notes()
        environments, turn = conversation.environments(), conversation.said(called((1, 2)))
        first = answered(environments, turn)
        second_turn = conversation.then(turn, first, called((4, 5)))
        second = answered(environments, second_turn)
        last_turn = conversation.then(second_turn, second, "nine")
        undisturbed = notes()
        other = conversation.environments()
        again = answered(other, second_turn)
        assert (again.token_ids, again.finish) == (second.token_ids, Finish.RUNNING)
        assert (record_of(again).rebuilt, record_of(again).diverged) == ("replayed", False)
        assert notes() == undisturbed
        assert ended(answered(other, last_turn)) == ended(answered(environments, last_turn)) == (Finish.STOP, (), 2.0)
        assert ended(answered(conversation.environments(), last_turn)) == (Finish.STOP, (), 2.0)


def test_an_agent_without_tools_adds_messages_of_the_user(notes):
    with talk("chats") as conversation:
        environments, turn = conversation.environments(), conversation.said("one")
        first = answered(environments, turn)
        assert text_of(first.token_ids) == "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
        assert ended(answered(environments, conversation.then(turn, first, "done"))) == (Finish.STOP, (), None)
        assert notes() == ["one", "done"]


def test_responses_are_answered_side_by_side(notes):
    with talk("chats") as conversation:
        environments = conversation.environments()
        turns = [conversation.said(f"{k}", k) for k in range(12)]
        environments.begin(turns)
        first = gathered(environments, 12)
        environments.begin([conversation.then(turn, first[turn.response], "done") for turn in turns])
        assert {answer.finish for answer in gathered(environments, 12).values()} == {Finish.STOP}


def test_another_conversation_has_diverged(notes):
    with talk("forgets") as conversation:
        for restarts, finish in ((1, Finish.AGAIN), (2, Finish.FAILED)):
            answer = answered(conversation.environments(), conversation.said("one", restarts=restarts))
            assert ended(answer) == (finish, (), None)
            assert record_of(answer).diverged
            assert "do not go on with the conversation" in record_of(answer).failure


def test_an_agent_that_asks_otherwise_when_it_runs_again_has_diverged(notes):
    with talk("wavers") as conversation:
        environments, turn = conversation.environments(), conversation.said("one")
        second_turn = conversation.then(turn, answered(environments, turn), "two")
        answer = answered(conversation.environments(), second_turn)
        assert (answer.finish, record_of(answer).diverged) == (Finish.AGAIN, True)
        assert "request after turn 0 is not the recorded one" in record_of(answer).failure
        assert not record_of(answered(environments, second_turn)).diverged


def test_a_first_request_that_is_not_the_planned_one_has_diverged(notes):
    with talk("adds", {"start": 0}) as conversation:
        conversation.prompt = conversation.prompt.__class__(
            "p", conversation.prompt.token_ids[1:], ASKED, {"start": 0}, conversation.prompt.opening
        )
        answer = answered(conversation.environments(), conversation.said("x"))
        assert (answer.finish, record_of(answer).diverged) == (Finish.AGAIN, True)


def test_requests_side_by_side_are_refused(notes):
    with talk("hurries") as conversation:
        environments, turn = conversation.environments(), conversation.said("one")
        first = answered(environments, turn)
        found: list[str] = []
        wait_until(lambda: found.extend(notes()) or found)
        assert found == ["a request came while another one was not answered; allowed: one at a time"]
        assert ended(answered(environments, conversation.then(turn, first, "two"))) == (Finish.STOP, (), 1.0)


@pytest.mark.parametrize(
    ("agent", "settings", "reason"),
    [
        ("raises", {}, "the agent raised ValueError: no more"),
        ("sleeps", {"call_time_limit_s": 0.5}, "the agent took longer than 0.5 s to its next request, or its end"),
    ],
)
def test_an_agent_that_fails_is_a_lost_environment(notes, agent, settings, reason):
    with talk(agent, **settings) as conversation:
        answer = answered(conversation.environments(), conversation.said("one"))
        assert ended(answer) == (Finish.AGAIN, (), None)
        assert reason in record_of(answer).failure
        assert not record_of(answer).diverged


def test_a_process_that_ends_is_replaced_and_the_agent_runs_again(notes):
    with talk("dies_once") as conversation:
        environments, turn = conversation.environments(), conversation.said("one")
        first = answered(environments, turn)
        assert first.finish is Finish.RUNNING
        assert ended(answered(environments, conversation.then(turn, first, "two"))) == (Finish.STOP, (), 1.0)


def test_a_client_that_asks_again_gets_the_same_answer(notes):
    with talk("impatient") as conversation:
        notes()
        environments, turn = conversation.environments(), conversation.said("one")
        first = answered(environments, turn)
        for patience in range(2):
            found: list[str] = []
            wait_until(lambda found=found: found.extend(notes()) or found)
            assert found == [f"hung up {patience}"]
        assert ended(answered(environments, conversation.then(turn, first, "two"))) == (Finish.STOP, (), 1.0)


def test_the_last_turn_is_read_and_no_other_is_asked_for(notes):
    with talk("endless", turns_max=2) as conversation:
        notes()
        environments, turn = conversation.environments(), conversation.said("one")
        last = answered(environments, conversation.then(turn, answered(environments, turn), "two"))
        assert ended(last) == (Finish.LENGTH, (), 2.0)
        assert notes() == ["turns.turns_max, 2, is reached"]


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({"stopped": False}, {}, "sampling.max_completion_length is reached"),
        ({"room": 0}, {}, "sampling.max_completion_length is reached"),
        ({"room": 5}, {}, "the new messages have 40 tokens; allowed: 4 "),
        ({}, {"observation_tokens_max": 7}, "the new messages have 40 tokens; allowed: 7 "),
    ],
)
def test_a_limit_ends_the_response_with_the_agents_reward(notes, changes, settings, reason):
    with talk("endless", **settings) as conversation:
        notes()
        answer = answered(conversation.environments(), conversation.said("one", **changes))
        assert ended(answer) == (Finish.LENGTH, (), 1.0)
        assert notes()[0].startswith(reason)


def test_one_that_raises_at_a_limit_is_not_lost_and_has_earned_nothing(notes):
    with talk("stubborn") as conversation:
        answer = answered(conversation.environments(), conversation.said("one", room=0))
        assert ended(answer) == (Finish.LENGTH, (), 0.0)


def test_a_forgotten_response_ends_its_agent(notes):
    with talk("stubborn", call_time_limit_s=LIMIT_S) as conversation:
        environments, turn = conversation.environments(), conversation.said("one")
        first = answered(environments, turn)
        environments.forget([0])
        again = answered(environments, conversation.then(turn, first, "two"))
        assert (again.finish, record_of(again).rebuilt) == (Finish.RUNNING, "replayed")


def test_closing_ends_all_processes_and_may_be_repeated(notes):
    with talk("chats") as conversation:
        environments = conversation.environments()
        answered(environments, conversation.said("one"))
        environments.close()
        environments.close()
        wait_until(lambda: not [each for each in descendants(os.getpid()) if "environment_worker" in command(each)])
        assert environments.answers(1e9) == []
