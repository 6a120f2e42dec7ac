"""The port of `gleaner serve`: who is answered, in which form, and for how long."""

import asyncio
import gc
import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from storage.stores.connect import connect
from tasks.learning.journal_follower import GroupTimeout
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.serving.request_server import RequestServer
from tasks.turns.agent_language import AgentLanguage
from tasks.turns.chat_request import read_request
from tasks.turns.unreadable_body import BODY_BYTES_MAX
from tests.chat_tokenizers import CHATML, QWEN, chat_tokenizer, written
from tests.processes import wait_until
from tests.served_run import crew, life, machines, settings
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

KEY = "a-key-of-enough-characters"
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "1+1=", "logprobs": 0, "return_token_ids": True}


@contextmanager
def served(given, timeout_s=60.0):
    """A listening server of a life; yields its port and the life."""
    with life(given) as server:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="loop")
        thread.start()
        try:
            port = RequestServer(
                server.book, server.model, given.sampling, secret=KEY, timeout_s=timeout_s, request_timeout_s=1.0
            )
            runner = asyncio.run_coroutine_threadsafe(port.start("127.0.0.1", 0), loop).result(30)
            yield runner.addresses[0][1], server
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)
            loop.close()


def send(port, body=BODY, path=PATH, method="POST", **headers):
    """Status and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=90)
    sent = {"Authorization": f"Bearer {KEY}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body).encode(), sent)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, text


@pytest.fixture(scope="module")
def port(tmp_path_factory, model):
    url = str(tmp_path_factory.mktemp("served") / "run")
    with served(settings(url, model)) as (number, server), crew(url):
        yield number, server, url


def test_an_answer_has_tokens_and_log_probs_and_is_the_same_again(port):
    status, text = send(port[0], Idempotency_Key="a")
    answer = json.loads(text)
    [choice] = answer["choices"]
    assert (status, answer["object"], choice["finish_reason"]) == (200, "text_completion", "length")
    ids, logprobs = choice["token_ids"], choice["logprobs"]
    assert choice["text"] == port[1].model.text(ids)
    assert (len(ids), len(logprobs["token_logprobs"]), len(logprobs["tokens"])) == (40, 40, 40)
    assert answer["usage"] == {
        "prompt_tokens": len(choice["prompt_token_ids"]),
        "completion_tokens": 40,
        "total_tokens": len(choice["prompt_token_ids"]) + 40,
    }
    assert send(port[0], Idempotency_Key="a") == (200, text)


def test_a_shorter_answer_is_the_beginning_and_several_differ(port):
    body = {"prompt": [3, 4], "n": 3, "max_tokens": 4, "return_token_ids": True}
    choices = json.loads(send(port[0], body, Idempotency_Key="short")[1])["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert {(len(choice["token_ids"]), choice["finish_reason"]) for choice in choices} == {(4, "length")}
    assert len({str(choice["token_ids"]) for choice in choices}) == 3
    assert choices[0]["prompt_token_ids"] == [3, 4]


def test_requests_without_a_key_are_two_requests(port):
    first, second = (json.loads(send(port[0])[1]) for _ in range(2))
    assert first["id"] != second["id"]
    assert not [key for key in connect(port[2]).list("requests/") if first["id"].removeprefix("cmpl-") in key]


@pytest.mark.parametrize(
    ("given", "status", "message"),
    [
        ({"Authorization": "Bearer wrong"}, 401, "the API key is not this server's"),
        ({"Authorization": f"Basic {KEY}"}, 401, "the API key is not this server's"),
        ({"Host": "evil.example"}, 403, "the Host header names another machine"),
        ({"Idempotency_Key": ""}, 400, "Idempotency-Key: allowed: 1 to 255 visible ASCII characters"),
        ({"Idempotency_Key": "a" * 256}, 400, "Idempotency-Key: allowed: 1 to 255 visible ASCII characters"),
        ({"path": "/v1/embeddings"}, 404, "POST /v1/embeddings: not served; allowed: POST /v1/completions"),
        ({"method": "GET"}, 405, "GET /v1/completions: not served"),
        ({"body": b"no JSON"}, 400, "the body cannot be read as JSON"),
        ({"body": b"no gzip", "Content_Encoding": "gzip"}, 400, "the body is not of its Content-Encoding"),
        ({"body": {"prompt": "1", "seed": 3}}, 400, "seed: value 3; allowed: none"),
        ({"body": {"prompt": [99999]}}, 400, "prompt "),
        ({"body": {**BODY, "n": 2}, "Idempotency_Key": "a"}, 422, "Idempotency-Key: the key was used for another"),
    ],
)
def test_others_and_what_is_not_served_are_refused_in_openai_s_form(port, given, status, message):
    send(port[0], Idempotency_Key="a")
    found, text = send(port[0], **given)
    error = json.loads(text)["error"]
    assert (found, set(error)) == (status, {"message", "type", "param", "code"})
    assert error["message"].startswith(message)
    assert KEY not in text.decode()


def test_a_body_of_any_depth_is_refused(port):
    deep = ('{"a":' * depth + "1" + "}" * depth for depth in range(900, 1000))
    bodies = (f'{{"model": "policy", "messages": [{{"role": "user", "content": {each}}}]}}' for each in deep)
    assert {send(port[0], body.encode(), CHAT)[0] for body in bodies} == {400}


def test_a_long_body_is_refused(port):
    try:
        status, _ = send(port[0], b"x" * (BODY_BYTES_MAX + 1))
    except OSError:  # the connection may be closed before all is sent
        status = 413
    assert status == 413


def test_a_body_that_does_not_come_is_given_up(port):
    with socket.create_connection(("127.0.0.1", port[0]), timeout=30) as slow:
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n{{"
        )
        slow.sendall(head.encode())
        assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", [b"", f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()])
def test_a_connection_without_a_whole_first_head_is_closed(port, sent):
    with socket.create_connection(("127.0.0.1", port[0]), timeout=30) as slow:
        slow.sendall(sent)
        assert slow.recv(65536) == b""


def test_a_connection_with_a_request_stays_open_for_more(port):
    head = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port[0]), timeout=30) as kept:
        for _ in range(2):
            kept.sendall(head)
            assert kept.recv(65536).startswith(b"HTTP/1.1 200 ")
            time.sleep(2.0)


def test_models_are_listed_for_those_who_know_the_key(port):
    assert json.loads(send(port[0], path="/v1/models", method="GET")[1])["data"][0]["id"] == "policy"
    assert send(port[0], path="/v1/models", method="GET", Authorization="")[0] == 401


def test_a_request_without_members_ends_and_its_key_waits_on(tmp_path, model):
    url = str(tmp_path / "run")
    with served(settings(url, model), timeout_s=0.5) as (number, _):
        status, text = send(number, Idempotency_Key="late")
        assert (status, json.loads(text)["error"]["code"]) == (504, "not_finished")
        with crew(url):
            for _ in range(60):
                status, text = send(number, Idempotency_Key="late")
                if status == 200:
                    break
    assert status == 200


def looks(number, count):
    """Ask for one answer again and again, which does not come."""
    for _ in range(count):
        assert send(number, Idempotency_Key="late")[0] == 504


def held():
    """How many futures of event loops are in memory."""
    gc.collect()
    return sum(isinstance(each, asyncio.Future) for each in gc.get_objects())


def test_looks_in_vain_take_no_memory_and_no_line_of_the_log(tmp_path, model, caplog):
    url = str(tmp_path / "run")
    with served(settings(url, model), timeout_s=0.05) as (number, server):
        looks(number, 3)
        before = held()
        looks(number, 20)
        assert held() - before < 10
        server.windows.end(GroupTimeout("no member came"))
        assert send(number, Idempotency_Key="late")[0] == 503
        gc.collect()
        with crew(url):
            wait_until(lambda: server.windows.step == 1)
    assert "never retrieved" not in caplog.text


def test_a_client_that_has_gone_does_not_count_among_those_who_wait(tmp_path, model, monkeypatch):
    monkeypatch.setattr("tasks.serving.windows.WAITING_MAX", 1)
    url = str(tmp_path / "run")
    with served(settings(url, model)) as (number, _):

        def waits_for_a_second(key):
            """Whether a request is taken; its client goes then."""
            body = json.dumps(BODY)
            head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nIdempotency-Key: {key}"
            with socket.create_connection(("127.0.0.1", number), timeout=1) as client:
                client.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
                try:
                    assert client.recv(12) == b"HTTP/1.1 429"
                except TimeoutError:
                    return True
            return False

        assert waits_for_a_second("gone")
        assert any(waits_for_a_second("next") for _ in range(20))
        monkeypatch.undo()
        with crew(url):
            for key in ("gone", "next"):
                assert json.loads(send(number, Idempotency_Key=key)[1])["choices"]


def test_chats_are_answered_whole_and_as_a_stream(tmp_path, monkeypatch):
    folder, url = tmp_path / "model", str(tmp_path / "run")
    save_tiny_model(folder, tiny_model(tiny_config()))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    body = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}], "return_token_ids": True, "n": 2}
    with served(settings(url, folder)) as (number, server), crew(url):
        # A tokenizer that works for long keeps no other client waiting.
        decode, threads = server.model.text, set()
        monkeypatch.setattr(
            server.model, "text", lambda ids: (threads.add(threading.current_thread().name), decode(ids))[1]
        )
        answer = json.loads(send(number, body, CHAT, Idempotency_Key="whole")[1])
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        for choice in answer["choices"]:
            assert choice["message"]["content"] == server.model.text(choice["token_ids"])
        assert answer["usage"]["completion_tokens"] == sum(len(each["token_ids"]) for each in answer["choices"])
        streamed = body | {"n": 1, "stream": True, "return_token_ids": False}
        status, text = send(number, streamed, CHAT, Idempotency_Key="stream")
        events = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: {")]
        assert (status, events[0]["choices"][0]["delta"]["role"]) == (200, "assistant")
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert threads
        assert "loop" not in threads


class Says(ScriptedEngine):
    """Writes one text in every response."""

    def __init__(self, ids, vocab_size, config):
        super().__init__(vocab_size, config.max_responses_in_flight)
        self._ids = ids

    def _token(self, request, key, position, version):
        return self._ids[position]


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLED = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TALK = [
    {"role": "user", "content": "Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "snow"},
    {"role": "user", "content": "Rome?"},
]


@pytest.mark.parametrize("template", [QWEN, CHATML])
def test_a_chat_with_tools_is_shown_to_the_policy_and_its_calls_are_answered(tmp_path, template):
    folder, url, tokenizer = tmp_path / "model", str(tmp_path / "run"), chat_tokenizer(template)
    save_tiny_model(folder, tiny_model(tiny_config(vocab_size=len(tokenizer), max_position_embeddings=4096)))
    tokenizer.save_pretrained(folder)
    ids = written(tokenizer, f"Let me see.\n{CALL}<|im_end|>")
    given = settings(url, folder, sampling={"max_completion_length": len(ids) + 9}, rollout={"flush_interval_s": 0.1})
    body = {"model": "policy", "messages": TALK, "tools": [WEATHER], "n": 2, "return_token_ids": True}
    with served(given) as (number, _), machines(url, 1, lambda config, _, size: Says(ids, size, config)):
        status, text = send(number, body, CHAT, Idempotency_Key="a")
        answer = json.loads(text)
        assert status == 200
        expected = AgentLanguage(tokenizer).prompt_ids(
            read_request(json.dumps({"model": "policy", "messages": TALK, "tools": [WEATHER]}).encode()).messages,
            [WEATHER],
        )
        assert answer["prompt_token_ids"] == list(expected)
        assert all(each in tokenizer.decode(expected) for each in ("Oslo?", '"weather"', '"city": "Oslo"', "snow"))
        calls = []
        for choice in answer["choices"]:
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Let me see.")
            calls += choice["message"]["tool_calls"]
        assert [call["function"] for call in calls] == [{"name": "weather", "arguments": '{"city": "Rome"}'}] * 2
        assert len({call["id"] for call in calls}) == 2
        assert send(number, body, CHAT, Idempotency_Key="a") == (200, text)
        # Without tools what the policy writes is text.
        plain = json.loads(send(number, {"model": "policy", "messages": TALK[:1]}, CHAT)[1])["choices"][0]
        assert (plain["finish_reason"], plain["message"].get("tool_calls")) == ("stop", None)
        assert CALL in plain["message"]["content"]
        streamed = send(number, body | {"n": 1, "stream": True, "return_token_ids": False}, CHAT)[1].decode()
        assert '"tool_calls":[{"index":0,"id":"call_' in streamed
        assert '"finish_reason":"tool_calls"' in streamed
        short = json.loads(send(number, body | {"n": 1, "max_tokens": 5}, CHAT)[1])["choices"][0]
        assert short["finish_reason"] == "length"


def test_tools_that_the_run_cannot_show_are_refused_by_name(tmp_path, model):
    body = {"model": "policy", "messages": TALK, "tools": [WEATHER]}
    with served(settings(str(tmp_path / "run"), model)) as (number, _):
        status, text = send(number, body, CHAT)
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, "messages")
    assert error["message"].startswith("the chat template refused the messages with these tools: ")
    told = {"source": "submitted", "chat_template_kwargs": {"enable_thinking": False}}
    with served(settings(str(tmp_path / "other"), model, data=told)) as (number, _):
        status, text = send(number, body, CHAT)
    assert (status, json.loads(text)["error"]["message"]) == (
        400,
        "tools: 1 given; allowed with the run's data.chat_template_kwargs: none",
    )
