from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.accelerators import Accelerator, accelerator
from resources.model_size import ModelSize, size_from_config
from tasks.crew_model.step_time import StepTime
from tasks.forecasting.engine_estimate import (
    LAYER_S,
    STEP_S,
    SUM_S,
    SUMS_PER_LAYER,
    Device,
    assumed_layers,
    decode_step_s,
    prefill_tokens_per_s,
    responses_that_fit,
    sent_s_per_token,
    step_points,
    train_s_per_token,
)

# A billion parameters in two bytes: 2 GB; 1 TB/s and 100 TFLOPS of which half are reached.
ROUND = Accelerator(
    name="round",
    also=(),
    memory_bytes=10e9,
    bandwidth_bytes_per_s=1e12,
    flops=1e14,
    link_bytes_per_s=1e11,
    source="",
    as_of="",
)
LAYERS = 20
MODEL = ModelSize(parameters=1e9, weight_bytes=2, kv_bytes_per_token=1000.0, layers=LAYERS)
CONSTANT_S = STEP_S + LAYERS * LAYER_S
ONE = Device(accelerator=ROUND, gpus=1, bandwidth_efficiency=0.5, mfu=0.5)
QWEN_2_5_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("batch", "expected_s"),
    [
        # 2e9 bytes at 5e11 per second, and a cache of 1000 tokens of 1000 bytes: 4 ms + 2 us.
        (1, 4e-3 + 2e-6),
        # 2 x 1e9 x 200 operations at 5e13 per second are 8 ms, more than the weights take.
        (200, 8e-3 + 400e-6),
    ],
)
def test_a_decode_step_is_bound_by_weights_and_then_by_arithmetic(batch: int, expected_s: float):
    assert decode_step_s(MODEL, ONE, batch, context_tokens=1000) == pytest.approx(CONSTANT_S + expected_s)


def test_what_is_looked_up_is_neither_read_nor_multiplied():
    untied = replace(MODEL, parameters=1.25e9, looked_up=0.25e9)
    assert decode_step_s(untied, ONE, 1, 1000) == pytest.approx(decode_step_s(MODEL, ONE, 1, 1000))
    assert prefill_tokens_per_s(untied, ONE) == pytest.approx(prefill_tokens_per_s(MODEL, ONE))
    assert untied.bytes == 2.5e9


def test_two_gpus_read_in_half_the_time_and_pay_for_what_they_exchange():
    two = Device(accelerator=ROUND, gpus=2, bandwidth_efficiency=0.5, mfu=0.5)
    shared_s = decode_step_s(MODEL, ONE, 50, 500) - CONSTANT_S
    sums_s = LAYERS * SUMS_PER_LAYER * SUM_S
    # A token's values between layers: 1e9 parameters are 12 x 20 x 2041^2. Half of the link's 1e11 bytes per second.
    sent_s = 50 * LAYERS * 2 * (2041.24 * 2) / 5e10
    assert 50 * sent_s_per_token(MODEL, two) == pytest.approx(sent_s, rel=1e-4)
    assert sent_s_per_token(MODEL, ONE) == 0
    assert decode_step_s(MODEL, two, 50, 500) == pytest.approx(CONSTANT_S + shared_s / 2 + sums_s + sent_s)
    assert prefill_tokens_per_s(MODEL, two) < 2 * prefill_tokens_per_s(MODEL, ONE)
    assert train_s_per_token(MODEL, two, 6.0) == pytest.approx(6e9 / 1e14)
    assert train_s_per_token(MODEL, two, 8.0) == pytest.approx(8e9 / 1e14)
    assert prefill_tokens_per_s(MODEL, ONE) == pytest.approx(25_000)


@given(responses_max=st.integers(1, 500), context=st.integers(1, 10_000))
def test_points_are_a_step_time_curve_that_meets_the_roofline(responses_max: int, context: int):
    points = step_points(MODEL, ONE, responses_max, context)
    curve = StepTime(points)
    assert points[-1][0] == responses_max
    for batch, _ in points:
        assert curve.step_s(batch) == pytest.approx(decode_step_s(MODEL, ONE, batch, context))


def test_what_does_not_fit_in_memory_is_refused():
    # 9 GB of 10, less 2 GB of weights: 7 GB hold 7 million tokens.
    assert responses_that_fit(MODEL, ONE, context_tokens=1000, memory_share=0.9) == 7000
    assert responses_that_fit(MODEL, ONE, context_tokens=1000, memory_share=0.5) == 3000
    # So much for the cache whatever the share, and never more than is left.
    assert responses_that_fit(MODEL, ONE, 1000, memory_share=0.1, cache_bytes=4e9) == 4000
    assert responses_that_fit(MODEL, ONE, 1000, memory_share=0.9, cache_bytes=20e9) == 8000
    large = replace(MODEL, parameters=7e9)
    with pytest.raises(ValueError, match=r"1 x round of an engine: 14 GB of weights .* in 90% of 10 GB; allowed: more"):
        responses_that_fit(large, ONE, 1000, memory_share=0.9)


def test_a_model_is_counted_from_its_config():
    found = size_from_config(QWEN_2_5_7B, weight_bytes=2)
    # The model card says 7.61 billion, and 28 layers x 4 heads x 128 x 2 x 2 bytes.
    assert found.parameters == pytest.approx(7.61e9, rel=1e-3)
    assert (found.kv_bytes_per_token, found.layers, found.weight_bytes) == (57_344, 28, 2)
    tied = size_from_config({**QWEN_2_5_7B, "tie_word_embeddings": True}, weight_bytes=2)
    assert found.parameters - tied.parameters == found.looked_up == 152064 * 3584
    assert tied.looked_up == 0
    # It is 3,584 values wide.
    assert found.width == pytest.approx(3584, rel=0.35)


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({}, 0),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0),
        ({"sliding_window": None}, 0),
        ({"sliding_window": 4096}, 28),
        ({"sliding_window": 4096, "max_window_layers": 21}, 7),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 28}, 0),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"] * 14}, 14),
        ({"attention_chunk_size": 4096, "layer_types": ["chunked_attention"] * 21 + ["full_attention"] * 7}, 21),
    ],
)
def test_a_layer_with_a_window_caches_no_more(fields, windowed):
    found = size_from_config({**QWEN_2_5_7B, **fields}, weight_bytes=2)
    assert found.windowed_layers == windowed
    assert found.cache_bytes(4096) == pytest.approx(57_344 * 4096)
    kept = (28 - windowed) * 40_960 + windowed * 4096
    assert found.cache_bytes(40_960) == pytest.approx(57_344 / 28 * kept)


def test_with_windows_more_responses_fit_and_a_step_reads_less():
    windowed = replace(MODEL, windowed_layers=LAYERS // 2, window=100)
    assert responses_that_fit(windowed, ONE, 1000, memory_share=0.9, cache_bytes=4e9) == int(4e6 / 550)
    saved_s = 8 * (1000 - 550) * 1000 / ONE.bytes_per_s
    assert decode_step_s(MODEL, ONE, 8, 1000) - decode_step_s(windowed, ONE, 8, 1000) == pytest.approx(saved_s)


def test_layers_are_assumed_as_models_of_that_size_have_them():
    for billions, layers in ((0.49, 24), (1.54, 28), (3.09, 36), (7.62, 28), (14.77, 48), (32.76, 64), (72.7, 80)):
        assert layers / 1.5 < assumed_layers(billions * 1e9) < layers * 1.5


def test_models_that_cannot_be_counted_are_refused():
    with pytest.raises(ValueError, match=r"policy\.path: value a mixture of experts; allowed: a dense model, or fore"):
        size_from_config({**QWEN_2_5_7B, "num_experts": 128}, 2)
    with pytest.raises(ValueError, match=r"config\.json has no number 'hidden_size'; allowed: forecast\.parameters"):
        size_from_config({"vocab_size": 10}, 2)


def test_a_small_model_is_not_as_fast_as_its_weights_are_read():
    """Qwen2.5-0.5B on an A100: its documentation has 312 tokens/s, and reading 1 GB takes half a millisecond."""
    config = {**QWEN_2_5_7B, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
    config |= {"num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True}
    model = size_from_config(config, weight_bytes=2)
    device = Device(accelerator=accelerator("a100-80g"), gpus=1, bandwidth_efficiency=0.76, mfu=0.35)
    assert 312 / 1.3 < 1 / decode_step_s(model, device, 1, 1000) < 312 * 1.3
