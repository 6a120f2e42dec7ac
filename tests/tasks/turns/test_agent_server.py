"""What an agent's address answers: the forms of OpenAI's API, and refusals of what is hostile or not served."""

import json

import pytest

from storage.journal.shard import Finish
from tasks.turns.chat_request import MODEL
from tasks.turns.testing import answered
from tasks.turns.unreadable_body import BODY_BYTES_MAX
from tests.agent_conversations import TOKENIZER, called, noted, talk

pytestmark = pytest.mark.slow
GOOD = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "begin"}]})
CHAT = "/chat/completions"


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_NOTES", str(tmp_path / "notes"))
    return noted(tmp_path / "notes")


def test_hostile_requests_are_refused_and_the_conversation_goes_on(notes):
    """A body as a number stands for so many bytes; `key` among the headers is the key that is sent."""
    bodies = [
        [CHAT, {"key": "wrong"}, GOOD],
        [CHAT, {"key": ""}, GOOD],
        [CHAT, {"Authorization": "Basic eDp5"}, GOOD],
        [CHAT, {"Host": "evil.example"}, GOOD],
        [CHAT, {}, "no JSON"],
        [CHAT, {}, GOOD.replace(MODEL, "gpt-5")],
        [CHAT, {}, GOOD.replace("}]", '}], "n": 2')],
        ["/embeddings", {}, GOOD],
        [CHAT, {"Content-Encoding": "gzip"}, GOOD],
        ["/../../999999/v1" + CHAT, {}, GOOD],
        [CHAT, {}, BODY_BYTES_MAX + 1],
        [CHAT, {}, 100 << 20],
    ]
    with talk("probes", {"bodies": bodies}) as conversation:
        notes()
        answer = answered(conversation.environments(), conversation.said("one"))
        assert answer.finish is Finish.STOP
        found = notes()
    codes = [(status, reply["error"]["code"]) for status, reply in found[:9]]
    assert codes[:3] == [(401, "invalid_api_key")] * 3
    assert codes[3:] == [
        (403, None),
        (400, None),
        (404, "model_not_found"),
        (400, None),
        (404, "unknown_url"),
        (400, None),
    ]
    assert found[9][0] in (401, 404)
    # A server that does not read on may close the connection before the client has read why.
    assert all(status in (0, 413) for status, _ in found[10:])
    assert found[6][1]["error"] == {
        "message": "n: value 2; allowed: 1",
        "type": "invalid_request_error",
        "param": "n",
        "code": None,
    }


def test_a_whole_answer_has_calls_log_probs_and_usage(notes):
    with talk("streams", {"fields": {"logprobs": True}}) as conversation:
        notes()
        turn = conversation.said("so:" + called((1, 2)))
        assert answered(conversation.environments(), turn).finish is Finish.STOP
        ((status, text),) = notes()
    answer = json.loads(text)
    (choice,) = answer["choices"]
    assert (status, answer["object"], answer["model"], choice["finish_reason"]) == (
        200,
        "chat.completion",
        MODEL,
        "tool_calls",
    )
    assert choice["message"]["content"] == "so:"
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": '{"a": 1, "b": 2}'})
    tokens = choice["logprobs"]["content"]
    assert [each["logprob"] for each in tokens] == list(turn.logprobs)
    assert "".join(each["token"] for each in tokens) == TOKENIZER.decode(list(turn.token_ids))
    assert answer["usage"] == {
        "prompt_tokens": len(turn.prompt.token_ids),
        "completion_tokens": len(turn.token_ids),
        "total_tokens": len(turn.prompt.token_ids) + len(turn.token_ids),
    }


def test_a_stream_has_the_same_parts(notes):
    fields = {"stream": True, "logprobs": True, "stream_options": {"include_usage": True}}
    with talk("streams", {"fields": fields}) as conversation:
        notes()
        turn = conversation.said("so:" + called((1, 2), (3, 4)))
        assert answered(conversation.environments(), turn).finish is Finish.STOP
        ((_, text),) = notes()
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    *chunks, usage = map(json.loads, events)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(turn.token_ids)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "so:"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["index"], json.loads(call["function"]["arguments"])) for call in calls] == [
        (0, {"a": 1, "b": 2}),
        (1, {"a": 3, "b": 4}),
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    logprobs = [
        each["logprob"] for chunk in chunks for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert logprobs == list(turn.logprobs)


@pytest.mark.parametrize(
    ("text", "content"),
    [("<tool_call>\nno JSON\n</tool_call>", "<tool_call>\nno JSON\n</tool_call>"), ("plain", "plain")],
)
def test_a_call_that_cannot_be_read_is_text(notes, text, content):
    with talk("streams", {"fields": {}}) as conversation:
        notes()
        answered(conversation.environments(), conversation.said(text))
        ((_, found),) = notes()
    (choice,) = json.loads(found)["choices"]
    assert (choice["message"]["content"], "tool_calls" in choice["message"]) == (content, False)
    assert choice["finish_reason"] == "stop"


def test_a_turn_that_the_limit_has_cut_says_so(notes):
    with talk("streams", {"fields": {}}) as conversation:
        notes()
        assert answered(conversation.environments(), conversation.said("one", stopped=False)).finish is Finish.LENGTH
        ((_, found),) = notes()
    assert json.loads(found)["choices"][0]["finish_reason"] == "length"
