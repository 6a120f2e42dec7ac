import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.importance import (
    effective_sample_size,
    importance_metrics,
    importance_weights,
    log_ratios,
    masked_sequence_weights,
    truncated_token_weights,
)

MASK = torch.tensor([[True, True], [True, False]])
CAPS = st.floats(1.0, 10.0)
SEEDS = st.integers(0, 1000)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def random_ratios(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 7, generator=generator, dtype=torch.float64)


def test_log_ratios_are_the_trainers_over_the_samplers_inside_the_mask():
    trainer = f64([[0.5, 0.2], [0.4, 1.0]]).log().requires_grad_()
    ratios = log_ratios(trainer, f64([[0.25, 0.4], [0.4, 0.1]]).log(), MASK)
    torch.testing.assert_close(ratios.exp(), f64([[2.0, 0.5], [1.0, 1.0]]))
    assert not ratios.requires_grad


def test_weights_by_hand():
    ratios = f64([[4.0, 0.5], [0.1, 1.0]]).log()
    torch.testing.assert_close(truncated_token_weights(ratios, 3.0), f64([[3.0, 0.5], [0.1, 1.0]]))
    torch.testing.assert_close(masked_sequence_weights(ratios, 3.0), f64([[2.0, 2.0], [0.1, 0.1]]))
    assert masked_sequence_weights(ratios, 1.5).tolist()[0] == [0.0, 0.0]
    assert masked_sequence_weights(ratios, 3.0, floor=1 / 3).tolist()[1] == [0.0, 0.0]
    assert torch.equal(importance_weights("token", ratios, 3.0), truncated_token_weights(ratios, 3.0))
    assert torch.equal(importance_weights("sequence-mask", ratios, 3.0), masked_sequence_weights(ratios, 3.0))


@given(SEEDS, CAPS)
def test_token_weights_never_exceed_the_cap_and_else_are_the_ratio(seed, cap):
    ratios = random_ratios(seed)
    weights = truncated_token_weights(ratios, cap)
    assert weights.max() <= cap * (1 + 1e-12)
    below = ratios.exp() < cap
    assert torch.equal(weights[below], ratios.exp()[below])


@given(SEEDS, CAPS)
def test_sequence_weights_are_zero_or_the_ratio_of_the_response_within_its_bounds(seed, cap):
    ratios = random_ratios(seed)
    whole = ratios.exp().prod(dim=1)
    weights = masked_sequence_weights(ratios, cap, floor=1 / cap)
    for row, ratio in zip(weights, whole.tolist(), strict=True):
        expected = ratio if 1 / cap <= ratio <= cap else 0.0
        assert row.tolist() == pytest.approx([expected] * 7, rel=1e-9)


@pytest.mark.parametrize("mode", ["token", "sequence-mask"])
def test_equal_policies_have_weights_of_exactly_one(mode):
    logprobs = -random_ratios(0).abs()
    ratios = log_ratios(logprobs, logprobs, torch.ones(5, 7, dtype=torch.bool))
    assert torch.equal(importance_weights(mode, ratios, 3.0), torch.ones(5, 7, dtype=torch.float64))


def test_a_response_that_is_far_off_does_not_overflow():
    ratios = torch.full((1, 1000), 5.0)
    assert masked_sequence_weights(ratios, 3.0).unique().tolist() == [0.0]
    assert truncated_token_weights(ratios * 100, 3.0).unique().tolist() == pytest.approx([3.0])


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20))
def test_effective_sample_size_is_a_fraction_that_scaling_does_not_change(weights):
    tensor = f64(weights)
    size = effective_sample_size(tensor)
    assert 1 / len(weights) - 1e-9 <= size <= 1 + 1e-9
    assert effective_sample_size(7 * tensor) == pytest.approx(size)


def test_effective_sample_size_by_hand():
    assert effective_sample_size(torch.full((5,), 0.3)) == pytest.approx(1.0)
    assert effective_sample_size(f64([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert effective_sample_size(f64([3.0, 1.0])) == 0.8
    assert effective_sample_size(torch.zeros(3)) == 0.0
    with pytest.raises(ValueError, match="weights: none"):
        effective_sample_size(torch.zeros(0))


def test_metrics_by_hand():
    ratios = f64([[4.0, 0.5], [0.1, math.e**9]]).log()
    metrics = importance_metrics(ratios, f64([[3.0, 1.0], [0.0, 9.0]]), MASK)
    assert metrics == pytest.approx(
        {
            "importance_sampling/ratio_q01": 0.1,
            "importance_sampling/ratio_q50": 0.5,
            "importance_sampling/ratio_q99": 4.0,
            "importance_sampling/ratio_min": 0.1,
            "importance_sampling/ratio_max": 4.0,
            "importance_sampling/ess": 16 / 30,
            "importance_sampling/frac_masked": 1 / 3,
        }
    )
