"""Agents through the client that OpenAI publishes."""

import pytest

from storage.journal.shard import Finish
from tasks.turns.testing import answered, record_of
from tests.agent_conversations import called, noted, talk

pytestmark = pytest.mark.slow
pytest.importorskip("openai")


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_NOTES", str(tmp_path / "notes"))
    return noted(tmp_path / "notes")


def test_its_tool_calls_and_log_probs_are_served_and_survive_a_kill(notes):
    with talk("tests.openai_agents:adds") as conversation:
        environments, turn = conversation.environments(), conversation.said("so" + called((1, 2), (3, 4)))
        first = answered(environments, turn)
        assert [message["content"] for message in record_of(first).messages] == ["3", "7"]
        last_turn = conversation.then(turn, first, "seven")
        own = list(last_turn.logprobs[len(turn.logprobs) :])
        for opened in (environments, conversation.environments()):
            last = answered(opened, last_turn)
            assert (last.finish, record_of(last).reward) == (Finish.STOP, 2.0)
        assert notes() == [["tool_calls", list(turn.logprobs)], ["stop", own]] * 2


def test_its_streams_are_served_and_a_limit_is_an_error_that_it_knows(notes):
    with talk("tests.openai_agents:streams", turns_max=2) as conversation:
        notes()
        environments, turn = conversation.environments(), conversation.said("one")
        second = conversation.then(turn, answered(environments, turn), "two")
        last = answered(environments, second)
        assert (last.finish, record_of(last).reward) == (Finish.LENGTH, 2.0)
        one, two, limit = notes()
    assert (one, two[0]) == (["one", len(turn.token_ids)], "two")
    assert limit[0] == "turns_max"
    assert "turns.turns_max, 2, is reached" in limit[1]
