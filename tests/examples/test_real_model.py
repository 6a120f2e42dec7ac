"""What a toy model cannot show, with SmolLM2-135M-Instruct: its template, its stop token, its layers, its distribution.

Skipped unless the packages of examples/real_model.txt are installed, as `make demo-real` does.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.real_demo import PROBLEMS, write_problems, write_settings
from examples.real_model import make_real_model, missing
from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from tasks.configuration.lora import LoraConfig
from tasks.configuration.run_config import RunConfig, load
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.adapted_policy import AdaptedPolicy
from tasks.learning.batching import collate
from tasks.learning.packing import pack
from tasks.learning.policy import Policy
from tasks.preparing.checks import check_files
from tasks.preparing.stop_tokens import find_stop_tokens
from tasks.prompts.loading import load_prompts
from tasks.prompts.tokenise import tokenise
from tasks.sampling.engines.engine import FinishReason, GenerationRequest
from tasks.sampling.engines.testing import Result, resumed, run
from tasks.sampling.engines.torch_engine import TorchEngine
from tests.tiny_model import plain_logprobs, weight_blocks

pytestmark = [pytest.mark.real, pytest.mark.slow]
CONTEXT_LENGTH, RESPONSES = 128, 12
CPU = TrainerConfig(device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("real")
    return found


@pytest.fixture(scope="module")
def real_model(folder: Path) -> Path:
    if (lacking := missing()) is not None:
        pytest.skip(lacking)
    make_real_model(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def plain(real_model):
    return AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def config(real_model, folder) -> RunConfig:
    """The settings of `make demo-real` without a GPU."""
    write_problems(folder / "additions.jsonl")
    write_settings(folder / "real.yaml", folder / "run", real_model, folder / "additions.jsonl", on_gpu=False)
    return load(folder / "real.yaml")


@pytest.fixture(scope="module")
def requests(real_model, config) -> list[GenerationRequest]:
    """Four prompts of the demo, three responses each."""
    tokenizer, prompts = AutoTokenizer.from_pretrained(real_model), load_prompts(config.data)
    ids = [tokenise(prompts[index], tokenizer, config.data, CONTEXT_LENGTH, 12) for index in range(RESPONSES // 3)]
    sampling = SamplingParams(
        max_completion_length=12, stop_token_ids=find_stop_tokens(real_model, tokenizer, in_chat=True).ids
    )
    return [
        GenerationRequest(index, index // 3, ids[index // 3], (), noise_key(5, 0, index), sampling)
        for index in range(RESPONSES)
    ]


def generated(model_dir: Path, model, requests, dtype: str) -> dict[int, Result]:
    engine = TorchEngine(
        model_dir, dtype=dtype, device="cpu", max_responses_in_flight=RESPONSES, context_length=CONTEXT_LENGTH
    )
    try:
        engine.load_weights(0, weight_blocks(model))
        return run(engine, requests)
    finally:
        engine.close()


def test_a_run_of_the_demo_is_accepted_without_a_doubt(config):
    *looked_at, stops = check_files(config)
    assert stops == "stop tokens: '<|im_end|>' (2)"
    assert looked_at


def test_a_prompt_is_a_conversation_that_the_assistant_goes_on_with(real_model, config, requests):
    text = AutoTokenizer.from_pretrained(real_model).decode(requests[0].prompt_ids)
    assert len(load_prompts(config.data)) == PROBLEMS
    assert text.count("<|im_start|>user\nWhat is ") == 3
    assert text.count("<|im_start|>assistant\nThe answer is ") == 2
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_responses_end_at_the_end_of_a_turn(real_model, plain, requests):
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    results = generated(real_model, plain, requests, "float32")
    stopped = [result for result in results.values() if result.finish_reason is FinishReason.STOP]
    assert len(stopped) > RESPONSES // 2
    assert {tokenizer.decode(result.token_ids[-1:]) for result in stopped} == {"<|im_end|>"}


@pytest.mark.parametrize(("dtype", "difference"), [("float32", 1e-4), ("bfloat16", 0.3)])
def test_log_probs_are_those_of_a_plain_pass(real_model, plain, requests, dtype, difference):
    results = generated(real_model, plain, requests, dtype)
    for item in requests:
        wanted = plain_logprobs(plain, item, results[item.response].token_ids)
        assert results[item.response].logprobs == pytest.approx(wanted, abs=difference)


def test_a_response_that_is_resumed_is_the_same(real_model, plain, requests):
    whole = generated(real_model, plain, requests, "float32")
    cut = [item for item in requests if len(whole[item.response].token_ids) > 4]
    rest = generated(real_model, plain, [resumed(item, whole[item.response].token_ids[:4]) for item in cut], "float32")
    assert len(cut) > RESPONSES // 2
    for item in cut:
        assert rest[item.response].token_ids == whole[item.response].token_ids[4:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_passes_compute_what_padded_ones_do(real_model, plain, requests, dtype):
    cuts = [len(item.prompt_ids) - 10 - 2 * item.response for item in requests]
    batch = collate(
        range(RESPONSES),
        [item.prompt_ids[:cut] for item, cut in zip(requests, cuts, strict=True)],
        [item.prompt_ids[cut:] for item, cut in zip(requests, cuts, strict=True)],
        [[0.0] * (len(item.prompt_ids) - cut) for item, cut in zip(requests, cuts, strict=True)],
    )
    found = []
    for packed in (False, True):
        policy = Policy(real_model, dict(plain.named_parameters()), TrainerConfig(device="cpu", dtype=dtype))
        if packed:
            pack(policy.module)
        found.append(policy.logprobs(batch, 1.0)[0])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4 if dtype == "float32" else 0.3)


def test_adapters_go_to_every_linear_layer_and_change_what_it_computes(real_model, plain):
    policy = AdaptedPolicy(real_model, dict(plain.named_parameters()), CPU, LoraConfig(rank=2), seed=1)
    assert len(policy.parameters()) == 30 * 7 * 2
