import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from tasks.learning.returns import discounted_returns, gae, normalised, token_rewards


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def random_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    lengths = torch.randint(1, 7, (4,), generator=generator)
    return rewards, values, torch.arange(6)[None] < lengths[:, None], lengths


def test_rewards_stand_with_the_last_token_and_the_kl_with_each():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    placed = token_rewards(f64([1.0, 2.0]), mask)
    assert placed.tolist() == [[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]]
    kl = f64([[0.5, 1.0, 7.0], [-1.0, 7.0, 7.0]]).requires_grad_()
    placed = token_rewards(f64([1.0, 2.0]), mask, kl, 0.1)
    torch.testing.assert_close(placed, f64([[-0.05, 0.9, 0.0], [2.1, 0.0, 0.0]]), rtol=0, atol=1e-15)
    assert not placed.requires_grad
    with pytest.raises(ValueError, match="response_mask: row 1 is empty"):
        token_rewards(f64([1.0, 2.0]), torch.tensor([[True], [False]]))


def test_discounted_returns_by_hand():
    mask = torch.tensor([[True, True, True], [True, False, False], [True, False, True]])
    returns = discounted_returns(f64([[1.0, 2.0, 4.0], [3.0, 9.0, 9.0], [1.0, 9.0, 4.0]]), mask, 0.5)
    assert returns.tolist() == [[3.0, 4.0, 4.0], [3.0, 0.0, 0.0], [3.0, 0.0, 4.0]]


def test_gae_by_hand():
    # delta(2) = 4 - 1 = 3; delta(1) = 2 + 0.5 * 1 - 2 = 0.5; A(1) = 0.5 + 0.5 * 0.8 * 3.
    advantages, returns = gae(
        f64([[2.0, 4.0, 9.0]]), f64([[2.0, 1.0, 9.0]]), torch.tensor([[True, True, False]]), gamma=0.5, gae_lambda=0.8
    )
    torch.testing.assert_close(advantages, f64([[1.7, 3.0, 0.0]]), rtol=0, atol=1e-15)
    torch.testing.assert_close(returns, f64([[3.7, 4.0, 0.0]]), rtol=0, atol=1e-15)


@given(st.integers(0, 1000), st.floats(0.1, 1.0), st.floats(0.0, 1.0))
def test_gae_is_the_sum_of_discounted_temporal_differences(seed, gamma, gae_lambda):
    rewards, values, mask, lengths = random_batch(seed)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    for row, length in enumerate(lengths.tolist()):
        following = [*values[row, 1:length].tolist(), 0.0]
        deltas = [float(rewards[row, t] + gamma * following[t] - values[row, t]) for t in range(length)]
        for t in range(length):
            expected = sum((gamma * gae_lambda) ** (u - t) * deltas[u] for u in range(t, length))
            assert float(advantages[row, t]) == pytest.approx(expected, abs=1e-9)
            assert float(returns[row, t] - values[row, t]) == pytest.approx(expected, abs=1e-9)
    assert advantages[~mask].abs().sum() == returns[~mask].abs().sum() == 0


@given(st.integers(0, 1000), st.floats(0.1, 1.0))
def test_gae_with_lambda_one_is_returns_minus_values_and_without_a_critic_returns(seed, gamma):
    rewards, values, mask, _ = random_batch(seed)
    advantages, _ = gae(rewards, values, mask, gamma=gamma, gae_lambda=1.0)
    plain = discounted_returns(rewards, mask, gamma)
    torch.testing.assert_close(advantages, (plain - values).masked_fill(~mask, 0.0), rtol=0, atol=1e-9)
    torch.testing.assert_close(gae(rewards, torch.zeros_like(values), mask, gamma=gamma, gae_lambda=1.0)[0], plain)


def gae_column_by_column(rewards, values, mask, gamma, gae_lambda):
    """The recursion as it is written in the paper, one column of torch after another."""
    following, running, found = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0]), []
    for column in reversed(range(values.shape[1])):
        inside = mask[:, column]
        delta = rewards[:, column] + gamma * following - values[:, column]
        running = torch.where(inside, delta + gamma * gae_lambda * running, running)
        following = torch.where(inside, values[:, column], following)
        found.append(running)
    advantages = torch.stack(found[::-1], dim=1).masked_fill(~mask, 0.0)
    return advantages, (advantages + values).masked_fill(~mask, 0.0)


@given(st.integers(0, 1000), st.floats(0.1, 1.0), st.floats(0.0, 1.0), st.sampled_from([torch.float32, torch.float64]))
def test_gae_has_the_bits_of_the_recursion_with_holes_in_the_mask(seed, gamma, gae_lambda, dtype):
    rewards, values, _, _ = random_batch(seed)
    rewards, values = rewards.to(dtype), values.to(dtype)
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed)) < 0.6
    found = gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    for ours, plain in zip(found, gae_column_by_column(rewards, values, mask, gamma, gae_lambda), strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("width", [257, 1000])
def test_gae_of_long_responses_is_the_recursion_within_rounding(width):
    generator = torch.Generator().manual_seed(width)
    rewards, values = (torch.randn(3, width, generator=generator, dtype=torch.float64) for _ in range(2))
    lengths = torch.tensor([width, 256, 300])
    mask = (torch.arange(width) < lengths[:, None]) & (torch.rand(3, width, generator=generator) < 0.9)
    for gamma, gae_lambda in ((1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.1, 0.0)):
        found = gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
        plain = gae_column_by_column(rewards, values, mask, gamma, gae_lambda)
        wider = gae(*(pad(each, (0, 600)) for each in (rewards, values, mask)), gamma=gamma, gae_lambda=gae_lambda)
        for ours, theirs, padded in zip(found, plain, wider, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            assert torch.equal(padded[:, :width], ours)


class Calls(TorchFunctionMode):
    """Counts calls of torch, which take the time of a recursion over short rows, and do not scatter as times do."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_gae_of_long_responses_needs_a_tenth_of_the_calls_of_the_recursion():
    rewards, values = torch.zeros(2, 16, 32_768, dtype=torch.float64)
    mask = torch.ones(16, 32_768, dtype=torch.bool)
    with Calls() as ours:
        gae(rewards, values, mask, gamma=0.99, gae_lambda=0.95)
    with Calls() as plain:
        gae_column_by_column(rewards, values, mask, 0.99, 0.95)
    assert ours.count < plain.count / 10


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_what_lies_outside_the_mask_has_no_influence_on_returns(garbage):
    rewards, values, mask, _ = random_batch(1)
    spoilt = [each.masked_fill(~mask, garbage) for each in (rewards, values)]
    for clean, found in zip(
        gae(rewards, values, mask, gamma=0.9, gae_lambda=0.8),
        gae(*spoilt, mask, gamma=0.9, gae_lambda=0.8),
        strict=True,
    ):
        assert torch.equal(clean, found)
    assert torch.equal(discounted_returns(rewards, mask, 0.9), discounted_returns(spoilt[0], mask, 0.9))


def test_tokens_outside_the_mask_are_passed_over():
    rewards, values, _, _ = random_batch(0)
    mask = torch.ones(4, 6, dtype=torch.bool)
    holes = mask.clone()
    holes[:, 2:4] = False
    kept = [0, 1, 4, 5]
    expected = gae(rewards[:, kept], values[:, kept], mask[:, :4], gamma=0.9, gae_lambda=0.7)
    found = gae(rewards, values, holes, gamma=0.9, gae_lambda=0.7)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a[:, kept], b)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.data())
def test_normalised_values_have_mean_zero_and_deviation_one(values, data):
    weights = torch.tensor(data.draw(st.lists(st.integers(1, 5), min_size=len(values), max_size=len(values))))
    tensor = f64(values)
    spread = tensor.repeat_interleave(weights).std()
    found = normalised(tensor, weights, 0.0).repeat_interleave(weights)
    if spread > 1e-6:
        assert found.mean().abs() < 1e-6
        assert float(found.std()) == pytest.approx(1.0, abs=1e-6)
        torch.testing.assert_close(normalised(3 * tensor - 7, weights, 0.0), normalised(tensor, weights, 0.0))


def test_normalised_leaves_out_what_does_not_count():
    values = f64([[1.0, 3.0, float("inf")]])
    found = normalised(values, torch.tensor([[True, True, False]]), 0.0)
    torch.testing.assert_close(found, f64([[-(0.5**0.5), 0.5**0.5, 0.0]]), rtol=0, atol=1e-15)
    assert found[0, 2] == 0
    assert normalised(f64([0.1] * 7), torch.ones(7), 0.0).tolist() == [0.0] * 7
    with pytest.raises(ValueError, match="weights: sum 1; allowed: at least 2"):
        normalised(values, torch.tensor([[True, False, False]]), 0.0)
    with pytest.raises(ValueError, match=r"weights: shape \(3,\); allowed: \(1, 3\)"):
        normalised(values, torch.ones(3), 0.0)
