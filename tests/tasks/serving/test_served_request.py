"""Bodies of requests to `gleaner serve`: what is honoured, and what is refused by name."""

import json

import pytest

from tasks.configuration.sampling import SamplingConfig
from tasks.serving.served_request import read_served
from tasks.turns.chat_request import Refusal

SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, max_completion_length=64)
USER = {"role": "user", "content": "1+1="}


def read(kind="text", **fields):
    whole = {"prompt": "1+1="} if kind == "text" else {"model": "policy", "messages": [USER]}
    return read_served(json.dumps(whole | fields).encode(), kind, SAMPLING)


def test_text_and_token_ids_are_read_with_what_a_plan_can_hold():
    asked = read(
        model="policy", n=3, max_tokens=9, logprobs=0, return_token_ids=True, temperature=0.7, top_p=0.9, user="me"
    )
    assert (asked.prompt, asked.n, asked.max_tokens, asked.logprobs, asked.with_token_ids) == ("1+1=", 3, 9, True, True)
    assert read(prompt=[5, 6]).prompt == (5, 6)
    plain = read(stop=None, seed=None)
    assert (plain.n, plain.max_tokens, plain.logprobs, plain.with_token_ids) == (1, 64, False, False)


def test_chats_are_those_of_agents():
    asked = read("chat", logprobs=True, max_completion_tokens=8, stream=True)
    assert asked.prompt == [USER]
    assert asked.chat is not None
    assert (asked.chat.stream, asked.logprobs, asked.max_tokens) == (True, True, 8)


def test_the_digest_is_of_all_that_was_asked_and_not_of_how_it_was_written():
    def digest(body: bytes, kind="text") -> str:
        return read_served(body, kind, SAMPLING).body

    assert digest(b'{"prompt": "a", "n": 2}') == digest(b'{"n":2,"prompt":"a"}')
    assert len({read().body, read(n=2).body, read(max_tokens=5).body, read("chat").body}) == 4


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("text", {"temperature": 1.0}, "temperature: value 1.0; allowed: 0.7, which is the run's sampling.temperature"),
        ("chat", {"temperature": 1.0}, "temperature: value 1.0; allowed: 0.7, which is the run's sampling.temperature"),
        ("text", {"top_p": True}, "top_p: value True; allowed: 0.9, which is the run's sampling.top_p"),
        ("text", {"top_k": 5}, "top_k: value 5; allowed: 0, which is the run's sampling.top_k"),
        (
            "text",
            {"max_tokens": 65},
            "max_tokens: value 65; allowed: 1 to 64 (the run's sampling.max_completion_length)",
        ),
        ("chat", {"max_completion_tokens": 0}, "max_completion_tokens: value 0; allowed: 1 to 64"),
        ("text", {"n": 129}, "n: value 129; allowed: 1 to 128"),
        ("text", {"n": True}, "n: value True; allowed: 1 to 128"),
        ("chat", {"n": 2, "stream": True}, "n: value 2; allowed with stream: 1"),
        (
            "chat",
            {"return_token_ids": True, "stream": True},
            "return_token_ids: value True; allowed with stream: false",
        ),
        ("text", {"stream": True}, "stream: value True; allowed: false, or none"),
        ("text", {"stop": ["a"]}, "stop: value ['a']; allowed: [], or none"),
        ("chat", {"stop": ["a"]}, "stop: value ['a']; allowed: none"),
        ("chat", {"seed": 1}, "seed: value 1; allowed: none, because the run's seed decides"),
        ("text", {"logprobs": 1}, "logprobs: value 1; allowed: 0, for the log-probs of the sampled tokens, or none"),
        ("text", {"logprobs": False}, "logprobs: value False; allowed: 0"),
        ("chat", {"top_logprobs": 2}, "top_logprobs: value 2; allowed: 0"),
        ("text", {"best_of": 2}, "best_of: value 2; allowed: 1"),
        ("text", {"min_tokens": 2}, "min_tokens: value 2; allowed: 0, or none"),
        ("text", {"guided_json": {}}, "guided_json: not supported"),
        ("text", {"prompt": ["a", "b"]}, "prompt: value ['a', 'b']; allowed: text, or a list of token ids, not empty"),
        ("text", {"prompt": [1, -1]}, "prompt: value [1, -1]; allowed"),
        ("text", {"prompt": [True]}, "prompt: value [True]; allowed"),
        ("text", {"prompt": ""}, "prompt: value ''; allowed"),
        ("text", {"model": "gpt-5"}, "model: value 'gpt-5'; allowed: 'policy'"),
        ("text", {"model": 3}, "model: value 3; allowed: 'policy'"),
        ("chat", {"messages": []}, "messages: there is none; allowed: at least one"),
        ("chat", {"tools": [{"type": "function"}]}, "tools.0.function: value None; allowed: an object"),
    ],
)
def test_what_the_run_cannot_honour_is_refused_by_name(kind, fields, message):
    with pytest.raises(Refusal) as refused:
        read(kind, **fields)
    assert refused.value.message.startswith(message)
    assert refused.value.param == message.partition(":")[0].partition(".")[0]


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[1]", b"null", b'{"prompt": NaN}', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused_in_one_line(body):
    with pytest.raises(Refusal, match=r"^the body ") as refused:
        read_served(body, "text", SAMPLING)
    assert "\n" not in refused.value.message
