import math

import pytest
import torch

from tasks.learning.config import AlgorithmConfig
from tasks.learning.loss import clipped_policy_loss, denominator, kl_penalty, token_losses, token_weights

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
LIMIT = 20


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def test_clipped_loss_by_hand():
    # ratios 1, 1.5, 0.5 under advantage +2 and -2, bounds 0.8 and 1.28
    old = torch.zeros(2, 3, dtype=torch.float64)
    new = f64([[1.0, 1.5, 0.5]] * 2).log().requires_grad_()
    result = clipped_policy_loss(new, old, f64([2.0, -2.0]), 0.2, 0.28)
    expected = f64([[-2.0, -2 * 1.28, -1.0], [2.0, 3.0, 2 * 0.8]])
    torch.testing.assert_close(result.loss.detach(), expected, rtol=0, atol=1e-15)
    assert result.clipped_high.tolist() == [[False, True, False], [False] * 3]
    assert result.clipped_low.tolist() == [[False] * 3, [False, False, True]]
    result.loss.sum().backward()
    # d(-r A) / d logprob = -r A where nothing is clipped, 0 where it is
    torch.testing.assert_close(new.grad, f64([[-2.0, 0.0, -1.0], [2.0, 3.0, 0.0]]), rtol=0, atol=1e-15)


def test_extreme_ratios_stay_finite():
    new = f64([[0.0, -1e4]]).requires_grad_()
    result = clipped_policy_loss(new, f64([[-1e4, 0.0]]), f64([-1.0]), 0.2, 0.28)
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(new.grad).all()


def test_kl_estimators_by_hand():
    new, reference = f64([[math.log(0.5)]]), f64([[math.log(0.25)]])
    assert kl_penalty(new, reference, "k1").item() == pytest.approx(math.log(2), abs=1e-15)
    assert kl_penalty(new, reference, "k2").item() == pytest.approx(math.log(2) ** 2 / 2, abs=1e-15)
    assert kl_penalty(new, reference, "k3").item() == pytest.approx(0.5 - 1 + math.log(2), abs=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator):
    policy, reference = f64([0.5, 0.3, 0.2]), f64([0.2, 0.2, 0.6])
    exact = (policy * (policy / reference).log()).sum()
    estimate = (policy * kl_penalty(policy.log()[None], reference.log()[None], estimator)[0]).sum()
    assert estimate.item() == pytest.approx(exact.item(), abs=1e-15)


def test_k3_is_never_negative_and_zero_for_equal_policies():
    new, reference = torch.randn(8, 8).double(), torch.randn(8, 8).double()
    assert (kl_penalty(new, reference, "k3") >= 0).all()
    assert kl_penalty(new, new, "k3").abs().max() == 0


def test_weights_and_denominators_by_hand():
    lengths = torch.tensor([2, 4])
    expected = {
        "token-mean": ([1.0, 1.0], 6.0),
        "seq-mean-token-mean": ([0.5, 0.25], 2.0),
        "seq-mean-token-sum": ([1.0, 1.0], 2.0),
        "seq-mean-token-sum-norm": ([0.1, 0.1], 2.0),
    }
    for mode, (weights, divisor) in expected.items():
        assert token_weights(lengths, mode, 10).tolist() == weights
        assert denominator(mode, 6, 2) == divisor
        with pytest.raises(ValueError, match="0 responses"):
            denominator(mode, 0, 0)


def random_case(seed=0):
    generator = torch.Generator().manual_seed(seed)
    new, old, reference = (-torch.rand(5, 7, generator=generator, dtype=torch.float64) * 3 for _ in range(3))
    lengths = torch.tensor([7, 1, 3, 5, 2])
    advantages = torch.randn(5, generator=generator, dtype=torch.float64)
    return new, new + 0.4 * (old - new), reference, lengths, advantages


def straightforward_loss(new, old, reference, *, lengths, advantages, mode, estimator, coefficient):
    """Token by token in plain Python, from the papers' formulas."""
    per_response = []
    for row, length in enumerate(lengths.tolist()):
        losses = []
        for column in range(length):
            ratio = torch.exp(new[row, column] - old[row, column])
            bounded = torch.clip(ratio, 0.8, 1.28)
            advantage = advantages[row]
            surrogate = torch.min(ratio * advantage, bounded * advantage)
            log_ratio = new[row, column] - reference[row, column]
            kl = {"k1": log_ratio, "k2": 0.5 * log_ratio**2, "k3": torch.exp(-log_ratio) + log_ratio - 1}[estimator]
            losses.append(-surrogate + coefficient * kl)
        per_response.append(losses)
    sums = [sum(losses) for losses in per_response]
    if mode == "token-mean":
        return sum(sums) / sum(len(losses) for losses in per_response)
    if mode == "seq-mean-token-mean":
        sums = [total / len(losses) for total, losses in zip(sums, per_response, strict=True)]
    if mode == "seq-mean-token-sum-norm":
        sums = [total / LIMIT for total in sums]
    return sum(sums) / len(sums)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_equal_the_straightforward_ones(mode, estimator):
    new, old, reference, lengths, advantages = random_case()
    mask = torch.arange(7)[None] < lengths[:, None]
    algorithm = AlgorithmConfig(loss_agg_mode=mode, kl_coef=0.05, kl_estimator=estimator)

    ours = new.clone().requires_grad_()
    losses = token_losses(ours, old, advantages, mask, algorithm=algorithm, reference_logprobs=reference)
    loss = (losses.loss * token_weights(lengths, mode, LIMIT)[:, None]).sum()
    loss = loss / denominator(mode, int(lengths.sum()), len(lengths))
    loss.backward()

    theirs = new.clone().requires_grad_()
    expected = straightforward_loss(
        theirs, old, reference, lengths=lengths, advantages=advantages, mode=mode, estimator=estimator, coefficient=0.05
    )
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    assert ours.grad[~mask].abs().max() == 0


def test_padding_has_no_influence_whatever_it_holds():
    new, old, reference, lengths, advantages = random_case()
    mask = torch.arange(7)[None] < lengths[:, None]
    algorithm = AlgorithmConfig(kl_coef=0.1)
    clean = token_losses(new, old, advantages, mask, algorithm=algorithm, reference_logprobs=reference)
    dirty = token_losses(
        new.masked_fill(~mask, 3.0), old.masked_fill(~mask, -50.0), advantages, mask,
        algorithm=algorithm, reference_logprobs=reference.masked_fill(~mask, float("inf")),
    )  # fmt: skip
    for name in ("loss", "ratio", "clipped_low", "clipped_high"):
        assert torch.equal(getattr(clean.policy, name), getattr(dirty.policy, name))
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(clean.kl, dirty.kl)


def test_kl_needs_a_reference():
    new, old, _, lengths, advantages = random_case()
    mask = torch.arange(7)[None] < lengths[:, None]
    with pytest.raises(ValueError, match=r"kl_coef: value 0\.1"):
        token_losses(new, old, advantages, mask, algorithm=AlgorithmConfig(kl_coef=0.1))
