import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.accelerators import Accelerator, accelerator
from tasks.forecasting.engine_estimate import (
    Device,
    ModelSize,
    decode_step_s,
    prefill_tokens_per_s,
    responses_that_fit,
    size_from_config,
    step_points,
    train_s_per_token,
)
from tasks.planning.step_time import StepTime

# A billion parameters in two bytes: 2 GB; 1 TB/s and 100 TFLOPS of which half are reached.
ROUND = Accelerator(
    name="round", also=(), memory_bytes=10e9, bandwidth_bytes_per_s=1e12, flops=1e14, source="", as_of=""
)
MODEL = ModelSize(parameters=1e9, weight_bytes=2, kv_bytes_per_token=1000.0)
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
    assert decode_step_s(MODEL, ONE, batch, context_tokens=1000) == pytest.approx(expected_s)


def test_two_gpus_take_half_the_time():
    two = Device(accelerator=ROUND, gpus=2, bandwidth_efficiency=0.5, mfu=0.5)
    assert decode_step_s(MODEL, two, 50, 500) == pytest.approx(decode_step_s(MODEL, ONE, 50, 500) / 2)
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
    large = ModelSize(parameters=7e9, weight_bytes=2, kv_bytes_per_token=1000.0)
    with pytest.raises(ValueError, match=r"1 x round of an engine: 14 GB of weights .* in 90% of 10 GB; allowed: more"):
        responses_that_fit(large, ONE, 1000, memory_share=0.9)


def test_a_model_is_counted_from_its_config():
    parameters, kv = size_from_config(QWEN_2_5_7B)
    # The model card says 7.61 billion, and 28 layers x 4 heads x 128 x 2 x 2 bytes.
    assert parameters == pytest.approx(7.61e9, rel=1e-3)
    assert kv == 57_344
    tied, _ = size_from_config({**QWEN_2_5_7B, "tie_word_embeddings": True})
    assert parameters - tied == 152064 * 3584


def test_models_that_cannot_be_counted_are_refused():
    with pytest.raises(ValueError, match=r"policy\.path: value a mixture of experts; allowed: a dense model, or fore"):
        size_from_config({**QWEN_2_5_7B, "num_experts": 128})
    with pytest.raises(ValueError, match=r"config\.json has no number 'hidden_size'; allowed: forecast\.parameters"):
        size_from_config({"vocab_size": 10})


def test_a_7b_model_on_an_h100_is_as_fast_as_is_said_of_it():
    """130 tokens/s alone and thousands together at 60 % of the bandwidth: what is reported of vLLM in bfloat16."""
    parameters, kv = size_from_config(QWEN_2_5_7B)
    model = ModelSize(parameters=parameters, weight_bytes=2, kv_bytes_per_token=kv)
    device = Device(accelerator=accelerator("h100"), gpus=1, bandwidth_efficiency=0.6, mfu=0.35)
    assert 100 < 1 / decode_step_s(model, device, 1, 1000) < 150
    assert 5_000 < 128 / decode_step_s(model, device, 128, 1000) < 12_000
