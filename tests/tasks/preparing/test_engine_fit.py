"""What is refused because no GPU of a pool holds it, or because vLLM has no kernel for it."""

import json

import pytest

from resources.accelerators import accelerator
from tasks.configuration.run_config import parse
from tasks.preparing.checks import check_files
from tasks.preparing.engine_fit import EngineMisfit, check_engine_fits
from tests.small_run import config, memory_store, model_directory, plan_iteration

QWEN3_1_7B = {
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
KV_BYTES = 2 * 28 * 8 * 128 * 2
HALF = QWEN3_1_7B | {"num_hidden_layers": 14}
OF_DRAFTS = "both with the draft model's (rollout.speculation.draft_model)"
L4 = {"machine": "g6.xlarge", "gpus": 1, "accelerator": "nvidia-l4"}


def checked(tmp_path, fields=QWEN3_1_7B, pool=L4, pools=None, algorithm=None, lora=None, draft=None, **rollout):
    """Check GSM8K's example with these fields of `rollout`: the doubts. draft: a draft model's config.json."""
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "draft").mkdir(exist_ok=True)
    (tmp_path / "draft" / "config.json").write_text(json.dumps(draft))
    draft_model = None if draft is None else str(tmp_path / "draft")
    document = {
        "run": {"url": "runs/x"},
        "policy": {"path": str(tmp_path)},
        "data": {"source": "arithmetic", "max_prompt_length": 512},
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": 4096},
        "algorithm": algorithm or {},
        "rollout": {"dtype": "bfloat16", "context_length": 4608, "max_responses_in_flight": 64} | rollout,
        "pools": pools or {"rollout": pool},
        "lora": lora,
    }
    return check_engine_fits(parse(document), tmp_path, draft_model)


def refused(tmp_path, **given):
    with pytest.raises(EngineMisfit) as error:
        checked(tmp_path, **given)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_where_the_image_decides_a_pool_is_refused_only_if_neither_engine_fits(tmp_path):
    [line] = checked(tmp_path, engine="auto")
    assert pytest.approx(33.8e9, rel=1e-3) == 64 * 4608 * KV_BYTES
    assert line.startswith(
        "pools.rollout: the torch engine, which auto takes where the image has no vLLM, needs 33.8 GB of cache for 64 "
        "responses (rollout.max_responses_in_flight) of up to 4608 tokens beside 3.4 GB of weights, more than 1 x L4 "
        "(24 GB) has; allowed: rollout.engine: vllm"
    )
    assert checked(tmp_path, engine="vllm") == []
    assert refused(tmp_path, engine="torch").startswith("pools.rollout: the torch engine needs 33.8 GB")
    large = QWEN3_1_7B | {"num_hidden_layers": 28 * 7}
    assert "the torch engine, which auto takes" in refused(tmp_path, fields=large, engine="auto")
    tight = {"kv_cache_memory_bytes": 500 << 20}
    [line] = checked(tmp_path, engine="auto", max_responses_in_flight=8, vllm=tight)
    assert "vLLM's cache of one response" in line
    assert checked(tmp_path, engine="auto", max_responses_in_flight=8) == []


def test_the_number_of_responses_that_is_allowed_instead_fits_and_one_more_does_not(tmp_path):
    fit = int(refused(tmp_path, engine="torch").rsplit(" ", 1)[1])
    assert fit == int((accelerator("l4").memory_bytes - 3.44e9) / (4608 * KV_BYTES))
    checked(tmp_path, engine="torch", max_responses_in_flight=fit)
    refused(tmp_path, engine="torch", max_responses_in_flight=fit + 1)


def test_responses_count_no_longer_than_prompt_and_completion_may_be(tmp_path):
    whole = refused(tmp_path, engine="torch", context_length=40_960)
    assert "of up to 4608 tokens" in whole


def test_float32_takes_twice_the_cache(tmp_path):
    checked(tmp_path, engine="torch", max_responses_in_flight=36)
    assert "38.1 GB of cache" in refused(tmp_path, engine="torch", max_responses_in_flight=36, dtype="float32")


def test_vllm_must_hold_one_response_of_the_whole_context(tmp_path):
    checked(tmp_path, engine="vllm", context_length=40_960)
    tight = {"gpu_memory_utilization": 0.3}
    line = refused(tmp_path, engine="vllm", context_length=40_960, vllm=tight)
    assert "vLLM's cache of one response of 40960 tokens (rollout.context_length) 4.7 GB" in line
    assert "cache of one response" in refused(tmp_path, engine="vllm", vllm={"kv_cache_memory_bytes": 500 << 20})
    checked(tmp_path, engine="vllm", vllm={"kv_cache_memory_bytes": 600 << 20})


def test_the_torch_engines_draft_model_has_weights_and_as_many_rows_of_cache(tmp_path):
    line = refused(tmp_path, engine="torch", draft=HALF)
    assert "needs 50.7 GB of cache for 64 responses" in line
    assert f"of up to 4608 tokens beside 5.5 GB of weights, {OF_DRAFTS}, more than 1 x L4 (24 GB) has" in line
    fit, weights = int(line.rsplit(" ", 1)[1]), 2 * (2 * 311_164_928 + 42 * 50_331_648)
    assert fit == int((accelerator("l4").memory_bytes - weights) / (4608 * KV_BYTES * 1.5)) == 23
    checked(tmp_path, engine="torch", draft=HALF, max_responses_in_flight=fit)
    refused(tmp_path, engine="torch", draft=HALF, max_responses_in_flight=fit + 1)
    checked(tmp_path, engine="torch", max_responses_in_flight=fit + 1)


def test_vllm_holds_the_draft_models_weights_and_its_cache_of_the_response(tmp_path):
    cache = {"kv_cache_memory_bytes": 600 << 20}
    checked(tmp_path, engine="vllm", vllm=cache)
    line = refused(tmp_path, engine="vllm", vllm=cache, draft=HALF)
    assert (
        "the weights take 5.5 GB, and vLLM's cache of one response of 4608 tokens (rollout.context_length) 0.8" in line
    )
    assert f" GB, {OF_DRAFTS}, more than 1 x L4" in line
    share = {"gpu_memory_utilization": 5.8 / 24}
    checked(tmp_path, engine="vllm", vllm=share)
    refused(tmp_path, engine="vllm", vllm=share, draft=HALF)


def test_a_draft_model_whose_size_is_not_known_is_passed_over(tmp_path):
    given = {"engine": "torch", "max_responses_in_flight": 36}
    checked(tmp_path, **given)
    checked(tmp_path, **given, draft=HALF | {"num_experts": 8})
    checked(tmp_path, **given, draft=[])
    refused(tmp_path, **given, draft=HALF)


def test_tensor_parallel_gpus_hold_it_together(tmp_path):
    large = QWEN3_1_7B | {"num_hidden_layers": 28 * 7}
    assert "1 x L4 (24 GB)" in refused(tmp_path, fields=large, engine="vllm")
    checked(tmp_path, fields=large, engine="vllm", pool=L4 | {"gpus": 2}, vllm={"tensor_parallel_size": 2})


def test_the_pool_that_is_too_small_is_named(tmp_path):
    pools = {"rollout": L4 | {"accelerator": "nvidia-h100"}, "more_rollout": {"far": L4}}
    assert refused(tmp_path, engine="torch", pools=pools).startswith("pools.more_rollout.far: ")


@pytest.mark.parametrize(
    "given",
    [
        {"pool": {"gpus": 0}},
        {"device": "cpu"},
        {"engine": "scripted"},
        {"fields": {"max_position_embeddings": 8192}},
        {"fields": QWEN3_1_7B | {"num_experts": 8}},
        {"pool": L4 | {"accelerator": "no-such-gpu"}},
    ],
)
def test_what_is_not_known_or_needs_no_gpu_is_passed_over(tmp_path, given):
    checked(tmp_path, **({"engine": "torch"} | given))


HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 32}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (HYBRID, "linear_attention"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"index_topk": 2048}, "index_topk"),
    ],
)
def test_a_model_without_invariant_kernels_is_refused_where_they_are_asked_for(tmp_path, fields, named):
    model = QWEN3_1_7B | fields
    line = refused(tmp_path, fields=model, engine="vllm", vllm={"batch_invariant": True})
    assert line.startswith("rollout.vllm.batch_invariant: value true, and vLLM has no batch-invariant kernel")
    assert f"config.json names {named};" in line
    checked(tmp_path, fields=model, engine="vllm")
    checked(tmp_path, fields=model, engine="vllm", vllm={"batch_invariant": False})
    uncorrected = {"importance_sampling": "none"}
    assert "value auto, and" in refused(tmp_path, fields=model, engine="vllm", algorithm=uncorrected)


def test_a_model_of_conv1d_is_refused_where_vllm_is_to_adapt_it(tmp_path):
    given = {"engine": "vllm", "vllm": {"max_lora_rank": 8}, "lora": {"rank": 8, "publish": "adapter"}}
    line = refused(tmp_path, fields=QWEN3_1_7B | {"model_type": "gpt2"}, **given)
    assert line.startswith("rollout.vllm.max_lora_rank: value 8, and vLLM adapts no Conv1D, which this model, a gpt2")
    checked(tmp_path, **given)


def test_attention_over_windows_has_invariant_kernels(tmp_path):
    windows = QWEN3_1_7B | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 1024}
    checked(tmp_path, fields=windows, engine="vllm", vllm={"batch_invariant": True})


def test_of_a_window_vllm_caches_no_more_and_the_torch_engine_whole_rows(tmp_path):
    every_second = {"layer_types": ["sliding_attention", "full_attention"] * 14, "sliding_window": 1024}
    cache = {"kv_cache_memory_bytes": int(40_960 * KV_BYTES * 0.6)}
    tight = {"engine": "vllm", "context_length": 40_960, "vllm": cache}
    assert "one response of 40960 tokens (rollout.context_length) 4.7 GB" in refused(tmp_path, **tight)
    checked(tmp_path, fields=QWEN3_1_7B | every_second, **tight)
    assert "needs 33.8 GB" in refused(tmp_path, fields=QWEN3_1_7B | every_second, engine="torch")


@pytest.mark.slow
def test_a_doubt_is_shown_by_check_and_logged_by_plan(tmp_path, caplog):
    tiny_cache = {"engine": "auto", "vllm": {"gpu_memory_utilization": 1e-9}}
    url, model = "memory://doubt", model_directory(tmp_path / "model")
    settings = config(url, model, rollout=tiny_cache, pools={"rollout": L4 | {"count": 1}})
    assert check_files(settings)[-1].startswith("not sure: pools.rollout: the weights take")
    memory_store("doubt")
    plan_iteration(settings)
    assert any(line.startswith("not sure: pools.rollout: the weights take") for line in caplog.messages)
