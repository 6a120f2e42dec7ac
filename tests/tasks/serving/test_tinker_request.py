"""Bodies of Tinker's `asample`: what is honoured, what is refused by name, and what names a request."""

import json

import pytest

from tasks.configuration.sampling import SamplingConfig
from tasks.serving.tinker_request import read_sample
from tasks.turns.chat_request import Refusal

SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, max_completion_length=64)
SESSION = f"{'a' * 32}:sample:0"
STOPS = {2: "<eos>", 7: "<|im_end|>"}
PARAMS = {"temperature": 0.7, "top_p": 0.9, "top_k": -1}


def body(params=(), **fields):
    """A body as tinker 0.38 sends it, with changes; None is no field."""
    whole = {
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}, {"tokens": [7]}]},
        "sampling_params": PARAMS | dict(params),
        "sampling_session_id": SESSION,
        "seq_id": 3,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
    }
    return {name: value for name, value in (whole | fields).items() if value is not None}


def read(given):
    return read_sample(json.dumps(given).encode(), SAMPLING, lambda: STOPS)


def test_tokens_and_lengths_are_read_and_log_probs_are_always_given():
    _, asked = read(body({"max_tokens": 9}))
    assert (asked.prompt, asked.n, asked.max_tokens, asked.logprobs, asked.with_token_ids) == (
        (5, 6, 7),
        2,
        9,
        True,
        True,
    )
    _, plain = read(body(num_samples=None, prompt_logprobs=None))
    assert (plain.n, plain.max_tokens) == (1, 64)


@pytest.mark.parametrize("stop", [None, [2], [7, 2], ["<eos>"], "<|im_end|>"])
def test_the_stop_tokens_of_the_run_may_be_named(stop):
    assert read(body({"stop": stop}))[1] == read(body())[1]


def test_a_name_is_of_the_session_and_its_counter_and_the_digest_of_what_is_asked():
    name, asked = read(body())
    assert read(body({"stop": [2]}, base_model="policy")) == (name, asked)
    assert read(body(seq_id=4)) == (read(body(seq_id=4))[0], asked)
    others = [body(seq_id=4), body(sampling_session_id=f"{'a' * 32}:sample:1")]
    assert len({name, *(read(other)[0] for other in others)}) == 3
    assert len({asked.body, read(body(num_samples=1))[1].body, read(body({"max_tokens": 9}))[1].body}) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (body({"temperature": 1}), "temperature: value 1; allowed: 0.7, which is the run's sampling.temperature"),
        (body({"top_p": 1}), "top_p: value 1; allowed: 0.9"),
        (body({"top_k": 5}), "top_k: value 5; allowed: 0"),
        (body({"seed": 0}), "seed: value 0; allowed: none, because the run's seed decides"),
        (body({"max_tokens": 65}), "max_tokens: value 65; allowed: 1 to 64"),
        (body({"min_p": 0.5}), "min_p: value 0.5; allowed: 0"),
        (
            body({"stop": ["\n\nUser:"]}),
            "stop: value ['\\n\\nUser:']; allowed: none, or stop tokens of the run, which all end it: '<eos>' (2)",
        ),
        (body({"stop": [2, 3]}), "stop: value [2, 3]; allowed"),
        (body({"stop": []}), "stop: value []; allowed"),
        (body({"stop": [2.0]}), "stop: value [2.0]; allowed"),
        (body({"stop": [[2]]}), "stop: value [[2]]; allowed"),
        (body(num_samples=129), "num_samples: value 129; allowed: 1 to 128"),
        (body(prompt_logprobs=True), "prompt_logprobs: value True; allowed: false, because members only generate"),
        (body(topk_prompt_logprobs=5), "topk_prompt_logprobs: value 5; allowed: 0"),
        (body(topk_sample_logprobs=5), "topk_sample_logprobs: value 5; allowed: 0"),
        (body(prompt_alt_tokens_k=1), "prompt_alt_tokens_k: value 1; allowed: 0"),
        (body(record_stability_info=True), "record_stability_info: value True; allowed: false"),
        (body(target_prompt_logprobs={"data": []}), "target_prompt_logprobs: not supported"),
        (body(base_model="Qwen/Qwen3-8B"), "base_model: value 'Qwen/Qwen3-8B'; allowed: 'policy'"),
        (body(model_path="tinker://a/b"), "model_path: value 'tinker://a/b'; allowed: none, with base_model 'policy'"),
        (body(sampling_session_id=None), "sampling_session_id: value None; allowed"),
        (body(sampling_session_id="../x"), "sampling_session_id: value '../x'; allowed"),
        (body(sampling_session_id=SESSION.replace("0", "\u0663")), "sampling_session_id: value"),
        (body(seq_id=True), "seq_id: value True; allowed: 0 to"),
        (body(seq_id=-1), "seq_id: value -1; allowed: 0 to"),
        (body(prompt=[5]), "prompt: value [5]; allowed: chunks of tokens"),
        (body(prompt={"chunks": [{"type": "image", "data": ""}]}), "prompt: a chunk of type 'image'; allowed"),
        (body(prompt={"chunks": []}), "prompt: value []; allowed"),
        (body(prompt={"chunks": [{"tokens": ["a"]}]}), "prompt: value ['a']; allowed"),
        (body(sampling_params=3), "sampling_params: value 3; allowed: an object"),
    ],
)
def test_what_the_run_cannot_honour_is_refused_by_name(given, message):
    with pytest.raises(Refusal) as refused:
        read(given)
    assert refused.value.message.startswith(message)
    assert refused.value.param == message.partition(":")[0]
    assert "\n" not in refused.value.message


def test_computed_log_probs_are_refused_as_such_whatever_sampling_their_client_names():
    # The client of Tinker asks so for `compute_logprobs`, at its own temperature of 1.
    asked = body({"temperature": 1, "top_p": 1, "max_tokens": 1}, num_samples=1, prompt_logprobs=True)
    with pytest.raises(Refusal, match=r"^prompt_logprobs: value True; allowed: false"):
        read(asked)


@pytest.mark.parametrize("given", [b"", b"[1]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused_in_one_line(given):
    with pytest.raises(Refusal, match=r"^the body "):
        read_sample(given, SAMPLING, lambda: STOPS)
