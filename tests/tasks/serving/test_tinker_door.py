"""Tinker's door of `gleaner serve`, asked in plain HTTP: futures outlive the server, the rest is refused by name."""

import json

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from storage.records import layout
from tests.dying_store import ProgramDies
from tests.processes import wait_until
from tests.served_run import crew, settings
from tests.small_run import Unreachable, memory_store
from tests.tasks.serving.test_request_server import KEY, send, served
from tests.tasks.serving.test_tinker_request import body

PARAMS = {"temperature": 1, "top_p": 1}


def response_class():
    """The part of tinker_public.proto with which the client of tinker 0.38 reads an answer."""
    file = descriptor_pb2.FileDescriptorProto(name="tinker.proto", package="tinker", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    sequence = file.message_type.add(name="SampledSequence")
    for name, number, kind in (("stop_reason", 1, kinds.TYPE_INT32), ("tokens", 2, 12), ("logprobs", 3, 12)):
        sequence.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    response = file.message_type.add(name="SampleResponse")
    response.field.add(
        name="sequences", number=1, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_REPEATED, type_name="SampledSequence"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tinker.SampleResponse"))


def decoded(text):
    """Tokens, log-probs and stop reason of each sequence."""
    found = response_class().FromString(text)
    return [
        (np.frombuffer(each.tokens, "<i4").tolist(), np.frombuffer(each.logprobs, "<f4").tolist(), each.stop_reason)
        for each in found.sequences
    ]


def ask(port, path, given=(), **headers):
    """Status and bytes of an answer to a client of Tinker."""
    headers = {"Authorization": "", "X_API_Key": f"tml-{KEY}"} | headers
    return send(port, dict(given), f"/api/v1/{path}", **headers)


def asked_json(port, path, given=()):
    status, text = ask(port, path, given)
    assert status == 200, text
    return json.loads(text)


def a_session(port):
    """The id of a new sampling session."""
    session = asked_json(port, "create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})
    given = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": "policy"}
    found = asked_json(port, "create_sampling_session", given)
    assert asked_json(port, "create_sampling_session", given) == found
    return found["sampling_session_id"]


def begun(port, session, seq_id=0, params=(), **fields):
    """What a client gets for its request at once."""
    return asked_json(
        port, "asample", body(PARAMS | dict(params), sampling_session_id=session, seq_id=seq_id, **fields)
    )


def resolved(port, name):
    status, text = ask(port, "retrieve_future", {"request_id": name, "allow_metadata_only": True})
    assert status == 200, text
    return text


@pytest.fixture(scope="module")
def port(tmp_path_factory, model):
    url = str(tmp_path_factory.mktemp("tinker") / "run")
    with served(settings(url, model)) as (number, server), crew(url):
        yield number, server


def test_what_the_client_asks_first_is_answered(port):
    config = asked_json(port[0], "client/config", {"sdk_version": "0.38.0"})
    assert not any(config[each] for each in ("pjwt_auth_enabled", "sample_use_retrieve_futures"))
    assert asked_json(port[0], "client/dynamic_config") == {"sample_cancel_enabled": False}
    status, text = send(port[0], path="/api/v1/get_server_capabilities", method="GET", X_API_Key=KEY, Authorization="")
    [known] = json.loads(text)["supported_models"]
    assert (status, known) == (200, {"model_name": "policy", "trainable": False, "sampleable": True})
    assert asked_json(port[0], "telemetry", {"events": []}) == {"status": "accepted"}
    for path in ("session_heartbeat", f"sessions/{'a' * 32}/finish"):
        assert ask(port[0], path, {"session_id": "a" * 32})[0] == 200


def test_a_future_has_tokens_and_log_probs_and_is_the_same_again(port):
    session = a_session(port[0])
    first = begun(port[0], session, params={"max_tokens": 7})
    assert begun(port[0], session, params={"max_tokens": 7}) == first
    assert len(set(first["sample_sequence_ids"])) == 2
    text = resolved(port[0], first["request_id"])
    assert resolved(port[0], first["request_id"]) == text
    # The same responses as /v1/completions would give.
    kept = port[1].book.kept(first["request_id"])
    answer = port[1].book.begin(first["request_id"], kept, has_key=True).result(30)
    responses = [each for group in answer.groups for each in group.responses]
    assert decoded(text) == [(each.token_ids[:7].tolist(), each.logprobs[:7].tolist(), 1) for each in responses]
    assert [len(ids) for ids, _, _ in decoded(text)] == [7, 7]
    assert begun(port[0], session, seq_id=1)["request_id"] != first["request_id"]


def test_a_response_that_stops_says_so(port):
    session = a_session(port[0])
    [stop] = port[1].model.stop_tokens()
    found = []
    for seq_id in range(200):
        found = decoded(resolved(port[0], begun(port[0], session, seq_id, {"stop": [stop]})["request_id"]))
        if any(reason == 0 for _, _, reason in found):
            break
    assert {(reason == 0, ids[-1] == stop) for ids, _, reason in found} <= {(True, True), (False, False)}
    assert any(reason == 0 for _, _, reason in found)


def test_a_future_that_was_given_out_resolves_in_a_later_life(model):
    name = "tinker-later"
    store = ProgramDies(name, {})
    memory_store(name, store)
    given = settings(f"memory://{name}", model)
    with served(given) as (number, server):
        session = a_session(number)
        # The server dies when it plans: the future is the last that it writes.
        store.left = 1
        future = begun(number, session)["request_id"]
        assert server.died.wait(60)
    store.left = 1 << 30
    with served(given) as (number, _), crew(given.run.url):
        text = resolved(number, future)
    with served(given) as (number, _):
        assert resolved(number, future) == text
    assert [len(ids) > 0 for ids, _, _ in decoded(text)] == [True, True]


def test_a_client_that_waits_looks_again(tmp_path, model, monkeypatch):
    monkeypatch.setattr("tasks.serving.tinker_door.LOOK_S", 0.3)
    url = str(tmp_path / "run")
    with served(settings(url, model)) as (number, server):
        name = begun(number, a_session(number))["request_id"]
        status, text = ask(number, "retrieve_future", {"request_id": name})
        # The client repeats 408 at once and without a word.
        again = {"type": "try_again", "request_id": name, "queue_state": "active"}
        assert (status, json.loads(text)) == (408, again)
        with monkeypatch.context() as away:
            away.setattr(server.book, "_store", Unreachable("away"))
            # A future of an earlier life of the server: those of this one wait on without the store.
            assert ask(number, "retrieve_future", {"request_id": name})[0] == 408
            status, text = ask(number, "retrieve_future", {"request_id": "b" * 32})
            # 429 is what it repeats after a time.
            assert status == 429
            assert json.loads(text)["error"]["message"].startswith("the run cannot answer now")
            assert send(number, Idempotency_Key="away")[0] == 503
        monkeypatch.undo()
        with crew(url):
            resolved(number, name)


def test_looks_at_a_future_that_waits_ask_nothing_of_the_store(model, monkeypatch):
    monkeypatch.setattr("tasks.serving.tinker_door.LOOK_S", 0.05)
    store = ProgramDies("tinker-looks", {})
    memory_store("tinker-looks", store)
    given = settings("memory://tinker-looks", model)
    with served(given) as (number, server):
        name = begun(number, a_session(number))["request_id"]
        wait_until(lambda: server.windows.answer(name))
        for _ in range(5):
            assert ask(number, "retrieve_future", {"request_id": name})[0] == 408
        assert [key for key in store.written if key.startswith("requests/")] == [layout.request(name)]
        monkeypatch.undo()
        with crew(given.run.url):
            resolved(number, name)


def test_a_client_that_asks_for_more_than_may_wait_is_told_to_ask_later(tmp_path, model, monkeypatch):
    monkeypatch.setattr("tasks.serving.windows.WAITING_MAX", 2)
    given = settings(str(tmp_path / "run"), model)
    with served(given) as (number, _):
        session, found = a_session(number), []
        while len(found) < 9 and 429 not in found:
            # No connection waits, and without members one window is planned.
            asked = body(PARAMS, sampling_session_id=session, seq_id=len(found))
            found.append(ask(number, "asample", asked)[0])
        assert found[-1] == 429
        with crew(given.run.url):
            wait_until(lambda: ask(number, "asample", asked)[0] == 200)
            for seq_id in range(len(found)):
                resolved(number, begun(number, session, seq_id)["request_id"])


@pytest.mark.parametrize(
    ("path", "given", "status", "message"),
    [
        ("create_sampling_session", {"session_id": "a" * 32, "base_model": "x"}, 404, "base_model: value 'x'; allowed"),
        ("create_sampling_session", {"model_path": "tinker://a/b"}, 404, "model_path: value 'tinker://a/b'; allowed"),
        ("create_sampling_session", {"session_id": "a"}, 400, "session_id: allowed"),
        ("create_sampling_session", {"session_id": "a" * 32}, 400, "sampling_session_seq_id: allowed"),
        ("asample", body(PARAMS | {"seed": 3}), 400, "seed: value 3; allowed: none"),
        ("asample", body(PARAMS | {"stop": "a"}), 400, "stop: value 'a'; allowed: none, or stop tokens of the run"),
        ("asample", body(PARAMS, prompt={"chunks": [{"tokens": [99999]}]}), 400, "prompt "),
        ("retrieve_future", {"request_id": "a" * 32}, 404, f"request_id: value '{'a' * 32}'; allowed"),
        ("retrieve_future", {"request_id": "../run"}, 404, "request_id: value '../run'; allowed"),
        ("retrieve_future", {}, 404, "request_id: value 'None'; allowed"),
        ("create_model", {"base_model": "policy"}, 404, "create_model: not served; this server samples from a run"),
        ("forward_backward", {}, 404, "forward_backward: not served"),
        ("retrieve_futures", {}, 404, "retrieve_futures: not served"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(port, path, given, status, message):
    found, text = ask(port[0], path, given)
    error = json.loads(text)["error"]
    assert (found, error["message"][: len(message)]) == (status, message)
    assert "\n" not in error["message"]


def test_a_number_of_a_session_has_one_request(port):
    session = a_session(port[0])
    begun(port[0], session)
    status, text = ask(port[0], "asample", body(PARAMS, sampling_session_id=session, seq_id=0, num_samples=1))
    assert (status, json.loads(text)["error"]["param"]) == (422, "seq_id")


def test_a_key_of_openai_s_clients_is_no_future(port):
    name = json.loads(send(port[0], Idempotency_Key="a")[1])["id"].removeprefix("cmpl-")
    assert ask(port[0], "retrieve_future", {"request_id": name})[0] == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X_API_Key": KEY}, 200),
        ({"X_API_Key": ""}, 401),
        ({"X_API_Key": "tml-wrong"}, 401),
        ({"X_API_Key": f"tml-tml-{KEY}"}, 401),
        ({"Host": "evil.example"}, 403),
    ],
)
def test_the_key_and_the_host_are_those_of_the_server(port, headers, status):
    found, text = ask(port[0], "create_session", **headers)
    assert found == status
    assert KEY not in text.decode()
