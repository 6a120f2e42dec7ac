import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.rollout import RolloutConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.correction import importance_mode, same_engine
from tasks.learning.importance import (
    NUM_BINS,
    effective_sample_size,
    importance_weights,
    log_ratio_counts,
    log_ratios,
    masked_sequence_weights,
    over_cap,
    ratio_quantile,
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
    ("given", "mode"), [("none", None), ("token", "token"), ("sequence-mask", "sequence-mask"), ("auto", "auto")]
)
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("max_staleness", range(9))
def test_auto_corrects_unless_engine_and_weights_are_the_trainers(given, mode, same, max_staleness):
    algorithm = AlgorithmConfig(importance_sampling=given, max_staleness=max_staleness)
    if mode == "auto":
        mode = None if same and max_staleness == 0 else "token"
    assert importance_mode(algorithm, same_engine=same) == mode


@pytest.mark.parametrize("given", ["none", "auto"])
def test_where_the_ratio_of_the_loss_is_to_the_sampler_nothing_is_corrected_twice(given):
    algorithm = AlgorithmConfig(importance_sampling=given, old_logprobs="sampler", max_staleness=1)
    assert importance_mode(algorithm, same_engine=False) is None


@pytest.mark.parametrize(
    ("engine", "dtypes", "published", "same"),
    [
        ("torch", ("float32", "float32"), {"F32"}, True),
        ("scripted", ("float32", "float32"), {"F32"}, True),
        ("scripted", ("bfloat16", "bfloat16"), {"F32"}, False),
        ("torch", ("bfloat16", "float32"), {"F32"}, False),
        ("torch", ("float32", "bfloat16"), {"F32"}, False),
        ("torch", ("float32", "float32"), {"BF16"}, False),
        ("torch", ("float32", "float32"), {"BF16", "F32"}, False),
        ("vllm", ("float32", "float32"), {"F32"}, False),
        ("auto", ("float32", "float32"), {"F32"}, False),
    ],
)
def test_only_our_own_engines_all_in_float32_are_known_to_compute_as_the_trainer(engine, dtypes, published, same):
    """Weights that are published in bfloat16 are not the trainer's, whatever computes with them."""
    rollout, trainer = RolloutConfig(engine=engine, dtype=dtypes[0]), TrainerConfig(dtype=dtypes[1])
    assert same_engine(rollout, trainer, published) is same


FRACTIONS = (0.01, 0.5, 0.99, 1.0)


@given(st.lists(st.floats(-6.0, 6.0), min_size=1, max_size=300), st.integers(1, 299))
def test_quantiles_are_right_to_the_stated_resolution_however_the_step_is_divided(values, cut):
    ratios = f64([values])
    mask = torch.ones(ratios.shape, dtype=torch.bool)
    whole = log_ratio_counts(ratios, mask)
    parts = log_ratio_counts(ratios[:, :cut], mask[:, :cut]) + log_ratio_counts(ratios[:, cut:], mask[:, cut:])
    assert torch.equal(whole, parts)
    smallest, largest = math.exp(min(values)), math.exp(max(values))
    for fraction in FRACTIONS:
        exact = math.exp(np.quantile(values, fraction, method="inverted_cdf"))
        found = ratio_quantile(whole.tolist(), fraction, smallest, largest)
        if math.exp(-4) < exact < math.exp(4):
            assert abs(math.log(found / exact)) <= 1 / 128 + 1e-9
        else:
            assert smallest <= found <= largest
            assert abs(math.log(found)) > 4 - 1 / 64


def test_ratios_by_hand():
    """Of six: two below all bins, three equal to 1 but for rounding, one above; what is not a number is no ratio."""
    ratios = f64([[-9.0, -7.0, 1e-7, -1e-7, 0.0, 5.0]])
    mask = torch.ones(ratios.shape, dtype=torch.bool)
    counts = log_ratio_counts(ratios, mask)
    assert len(counts) == NUM_BINS
    found = {index: count for index, count in enumerate(counts.tolist()) if count}
    assert found == {0: 2, NUM_BINS // 2: 3, NUM_BINS - 1: 1}
    limits = (math.exp(-9), math.exp(5))
    assert [ratio_quantile(counts.tolist(), q, *limits) for q in (0.01, 0.5, 0.99)] == [limits[0], 1.0, limits[1]]
    assert log_ratio_counts(ratios, ~mask).sum() == 0
    odd = f64([[math.nan, math.inf, -math.inf]])
    assert log_ratio_counts(odd, torch.ones(1, 3, dtype=torch.bool)).nonzero().flatten().tolist() == [0, 257, 514]


def test_a_quantile_is_never_outside_of_what_was_seen():
    counts = log_ratio_counts(f64([[0.003] * 4]), torch.ones(1, 4, dtype=torch.bool)).tolist()
    assert ratio_quantile(counts, 0.5, math.exp(0.003), math.exp(0.003)) == math.exp(0.003)


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
