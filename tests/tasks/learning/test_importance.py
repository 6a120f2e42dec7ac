import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.config import AlgorithmConfig
from tasks.learning.importance import (
    effective_sample_size,
    importance_mode,
    importance_weights,
    log_ratios,
    masked_sequence_weights,
    over_cap,
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


@pytest.mark.parametrize("mode", ["token", "sequence-mask"])
def test_over_the_cap_is_where_the_weight_is_not_the_ratio(mode):
    ratios = random_ratios(1)
    whole = ratios if mode == "token" else ratios.sum(dim=1, keepdim=True).expand_as(ratios)
    over = over_cap(mode, ratios, 1.5)
    assert 0 < over.sum() < over.numel()
    assert torch.equal(over, (importance_weights(mode, ratios, 1.5) - whole.exp()).abs() > 1e-12)


@pytest.mark.parametrize(
    ("given", "old", "mode"),
    [
        ("none", "trainer", None),
        ("token", "trainer", "token"),
        ("sequence-mask", "trainer", "sequence-mask"),
        ("auto", "trainer", "token"),
        ("auto", "sampler", None),
    ],
)
def test_auto_corrects_where_the_ratio_of_the_loss_does_not(given, old, mode):
    assert importance_mode(AlgorithmConfig(importance_sampling=given, old_logprobs=old)) == mode


def size(weights):
    return effective_sample_size(len(weights), sum(weights), sum(weight**2 for weight in weights))


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20))
def test_effective_sample_size_is_a_fraction_that_scaling_does_not_change(weights):
    assert 1 / len(weights) - 1e-9 <= size(weights) <= 1 + 1e-9
    assert size([7 * weight for weight in weights]) == pytest.approx(size(weights))


def test_effective_sample_size_by_hand():
    assert size([0.3] * 5) == pytest.approx(1.0)
    assert size([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert size([3.0, 1.0]) == 0.8
    assert size([0.0] * 3) == 0.0
    with pytest.raises(ValueError, match="weights: none"):
        size([])
