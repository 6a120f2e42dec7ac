import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.learning.batching import collate
from tasks.learning.loss import clipped_value_loss, denominator, kl_penalty, token_losses, token_weights
from tasks.learning.policy_losses import (
    cispo_policy_loss,
    clipped_policy_loss,
    gspo_policy_loss,
    policy_loss,
    reinforce_policy_loss,
)
from tasks.learning.step import accumulate

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [-100.0, -21.0, -5.0, 5.0, 19.9, 20.0, 20.1, 25.0, 100.0, 1e4])
def test_k3_draws_the_policy_to_the_reference_however_far_it_is(distance, dtype):
    """Its gradient, 1 - exp(d), has the sign of -d everywhere; beyond d = 20 it stays what it is there."""
    new = torch.zeros(1, 1, dtype=dtype).requires_grad_()
    kl = kl_penalty(new, torch.full((1, 1), distance, dtype=dtype), "k3")
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert kl.item() > 0
    assert new.grad.item() == pytest.approx(1 - math.exp(min(distance, 20.0)), rel=1e-6)


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


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", ["clip", "dual clip", "gspo", "cispo", "reinforce"])
def test_what_lies_outside_the_mask_reaches_no_gradient(name, per_token, garbage):
    new, old, reference, lengths, advantages = random_case()
    mask = torch.arange(7)[None] < lengths[:, None]
    algorithm = AlgorithmConfig(**{**vars(OBJECTIVES[name]), "kl_coef": 0.1})
    weights = torch.rand(5, 7, dtype=torch.float64)
    if per_token:
        advantages = advantages[:, None].expand(5, 7)

    def trained(fill):
        spoilt = [each.masked_fill(~mask, fill) for each in (new, old, reference, weights)]
        leaf = spoilt[0].requires_grad_()
        per_response = advantages.masked_fill(~mask, fill) if per_token else advantages
        losses = token_losses(
            leaf, spoilt[1], per_response, mask,
            algorithm=algorithm, reference_logprobs=spoilt[2], importance_weights=spoilt[3],
        )  # fmt: skip
        losses.loss.sum().backward()
        return losses.loss.detach(), leaf.grad

    for clean, spoilt in zip(trained(0.0), trained(garbage), strict=True):
        assert torch.equal(clean, spoilt)
        assert torch.isfinite(spoilt).all()
        assert not spoilt[~mask].any()


def test_gspo_by_itself_lets_nothing_from_outside_the_mask_in():
    new, old = f64([[1.0, float("nan")]]), f64([[0.5, float("nan")]])
    mask = torch.tensor([[True, False]])
    leaf = new.requires_grad_()
    gspo_policy_loss(leaf, old, f64([1.0]), mask, 0.9, 0.9).loss.masked_fill(~mask, 0.0).sum().backward()
    assert leaf.grad.tolist() == [[pytest.approx(-math.exp(0.5)), 0.0]]


def test_kl_needs_a_reference():
    new, old, _, lengths, advantages = random_case()
    mask = torch.arange(7)[None] < lengths[:, None]
    with pytest.raises(ValueError, match=r"kl_coef: value 0\.1"):
        token_losses(new, old, advantages, mask, algorithm=AlgorithmConfig(kl_coef=0.1))


OBJECTIVES = {
    "clip": AlgorithmConfig(loss_agg_mode="seq-mean-token-mean"),
    "dual clip": AlgorithmConfig(loss_agg_mode="seq-mean-token-mean", clip_ratio_c=1.5),
    "gspo": AlgorithmConfig(policy_loss="gspo", loss_agg_mode="seq-mean-token-mean", clip_ratio_high=0.05),
    "cispo": AlgorithmConfig(policy_loss="cispo", clip_ratio_low=1.0),
    "reinforce": AlgorithmConfig(policy_loss="reinforce"),
}


def gradient(objective, new, *args):
    """The objective's PolicyLoss, and the gradient of the sum of its token losses."""
    leaf = new.clone().requires_grad_()
    result = objective(leaf, *args)
    result.loss.sum().backward()
    return result, leaf.grad


def test_dual_clip_by_hand():
    # Ratios 0.5, 1.1, 2, 5 under advantage -2: the loss is max(0.8, r) * 2, at most 3 * 2.
    new, old = f64([[0.5, 1.1, 2.0, 5.0]]).log(), torch.zeros(1, 4, dtype=torch.float64)
    result, grad = gradient(clipped_policy_loss, new, old, f64([-2.0]), 0.2, 0.28, 3.0)
    torch.testing.assert_close(result.loss.detach(), f64([[1.6, 2.2, 4.0, 6.0]]), rtol=0, atol=1e-14)
    torch.testing.assert_close(grad, f64([[0.0, 2.2, 4.0, 0.0]]), rtol=0, atol=1e-14)
    assert result.clipped_low.tolist() == [[True, False, False, False]]
    assert result.clipped_high.tolist() == [[False, False, False, True]]
    positive, _ = gradient(clipped_policy_loss, new, old, f64([2.0]), 0.2, 0.28, 3.0)
    assert torch.equal(positive.loss, clipped_policy_loss(new, old, f64([2.0]), 0.2, 0.28).loss)


def test_gspo_by_hand():
    # Log ratios log 4 and 0 over two tokens: the response's ratio is 2, that of the third token is not looked at.
    new, old = f64([[4.0, 1.0, 9.0]]).log(), torch.zeros(1, 3, dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    result, grad = gradient(gspo_policy_loss, new, old, f64([-3.0]), mask, 0.2, 0.28)
    torch.testing.assert_close(result.ratio, f64([[2.0, 2.0, 2.0]]), rtol=0, atol=1e-14)
    torch.testing.assert_close(result.loss.detach(), f64([[6.0, 6.0, 6.0]]), rtol=0, atol=1e-14)
    torch.testing.assert_close(grad, f64([[6.0, 6.0, 0.0]]), rtol=0, atol=1e-14)
    clipped, grad = gradient(gspo_policy_loss, new, old, f64([3.0]), mask, 0.2, 0.28)
    torch.testing.assert_close(clipped.loss.detach(), f64([[-3.84] * 3]), rtol=0, atol=1e-14)
    assert clipped.clipped_high.tolist() == [[True] * 3]
    assert grad.abs().max() == 0


@given(st.integers(0, 10_000))
def test_gspo_of_single_tokens_is_the_clipped_surrogate(seed):
    generator = torch.Generator().manual_seed(seed)
    new, old = (torch.randn(6, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    ours, ours_grad = gradient(gspo_policy_loss, new, old, advantages, torch.ones(6, 1, dtype=torch.bool), 0.2, 0.28)
    clip, clip_grad = gradient(clipped_policy_loss, new, old, advantages, 0.2, 0.28)
    for name in ("loss", "ratio", "clipped_low", "clipped_high"):
        assert torch.equal(getattr(ours, name), getattr(clip, name))
    assert torch.equal(ours_grad, clip_grad)


@given(st.integers(0, 10_000))
def test_gspo_has_the_loss_and_gradient_of_the_papers_sequence_objective(seed):
    new, old, _, lengths, advantages = random_case(seed)
    mask = torch.arange(7)[None] < lengths[:, None]
    ours = new.clone().requires_grad_()
    loss = gspo_policy_loss(ours, old, advantages, mask, 0.05, 0.1).loss.masked_fill(~mask, 0.0)
    loss = (loss * token_weights(lengths, "seq-mean-token-mean", LIMIT)[:, None]).sum() / len(lengths)
    loss.backward()

    theirs = new.clone().requires_grad_()
    terms = []
    for row, length in enumerate(lengths.tolist()):
        ratio = ((theirs[row, :length] - old[row, :length]).sum() / length).exp()
        terms.append(torch.min(ratio * advantages[row], ratio.clip(0.95, 1.1) * advantages[row]))
    expected = -sum(terms) / len(terms)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


@given(st.integers(0, 10_000))
def test_gradient_of_cispo_is_the_cut_ratio_times_advantage_for_every_token(seed):
    new, old, _, _, advantages = random_case(seed)
    result, grad = gradient(cispo_policy_loss, new, old, advantages, 0.3, 0.28)
    ratio = (new - old).exp()
    assert torch.equal(result.ratio, ratio)
    torch.testing.assert_close(grad, -ratio.clip(0.7, 1.28) * advantages[:, None], rtol=0, atol=1e-12)
    assert torch.equal(result.clipped_high, ratio > 1.28)
    assert torch.equal(result.clipped_low, ratio < 0.7)
    assert torch.equal(cispo_policy_loss(new, old, advantages, 1.0, 4.0).clipped_low, torch.zeros(5, 7).bool())


def test_gradient_of_reinforce_is_minus_the_advantage_whatever_the_ratio():
    new, old, _, _, advantages = random_case()
    result, grad = gradient(reinforce_policy_loss, new, old, advantages)
    assert torch.equal(grad, -advantages[:, None].expand(5, 7))
    assert torch.equal(result.loss.detach(), -advantages[:, None] * new)
    assert torch.equal(result.ratio, (new - old).exp())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_all_objectives_have_the_gradient_of_reinforce(name):
    new, _, _, lengths, advantages = random_case()
    mask = torch.arange(7)[None] < lengths[:, None]
    result, grad = gradient(policy_loss, new, new, advantages, mask, OBJECTIVES[name])
    torch.testing.assert_close(grad, -advantages[:, None] * mask, rtol=0, atol=1e-14)
    assert torch.equal(result.ratio, torch.ones(5, 7, dtype=torch.float64).expand(result.ratio.shape))
    assert not (result.clipped_low | result.clipped_high).any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_advantages_per_token_may_be_the_responses(name):
    new, old, _, lengths, advantages = random_case()
    mask = torch.arange(7)[None] < lengths[:, None]
    per_response = gradient(policy_loss, new, old, advantages, mask, OBJECTIVES[name])
    per_token = gradient(policy_loss, new, old, advantages[:, None].expand(5, 7), mask, OBJECTIVES[name])
    assert torch.equal(per_response[0].loss[mask], per_token[0].loss[mask])
    assert torch.equal(per_response[1], per_token[1])
    assert not per_token[1][~mask].any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_do_not_depend_on_the_split_into_micro_batches(name, build, ragged):
    policy, rows, advantages = build(double=True), ragged(6), torch.randn(6)
    algorithm = OBJECTIVES[name]
    # Log-probs of the policy itself, moved a little, so that some ratios are clipped and some are not.
    logprobs = policy.logprobs(collate(*rows), 1.0)[0].detach()
    offsets = 0.6 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(3))
    recorded = [
        (row + offset)[: len(ids)].tolist() for row, offset, ids in zip(logprobs, offsets, rows[2], strict=True)
    ]
    algorithm = AlgorithmConfig(**{**vars(algorithm), "old_logprobs": "sampler"})

    def train(parts):
        policy.module.zero_grad()
        for part in parts:
            chosen = [[column[i] for i in part] for column in (*rows[:3], recorded)]
            totals = accumulate(
                policy, collate(*chosen), advantages[list(part)], algorithm, temperature=1.0, max_completion_length=12
            )
        return [parameter.grad.clone() for parameter in policy.parameters().values()], totals

    whole, totals = train([range(6)])
    split, _ = train([range(2), range(2, 3), range(3, 6)])
    assert max(float(grad.abs().max()) for grad in whole) > 1e-3
    assert name == "reinforce" or totals.clipped_low + totals.clipped_high > 0
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_kl_in_the_reward_is_measured_and_not_in_the_loss():
    new, old, reference, lengths, advantages = random_case()
    mask = torch.arange(7)[None] < lengths[:, None]
    inside = AlgorithmConfig(kl_coef=0.5)
    outside = AlgorithmConfig(kl_coef=0.5, kl_in="reward")
    a, b = (
        token_losses(new, old, advantages, mask, algorithm=algorithm, reference_logprobs=reference)
        for algorithm in (inside, outside)
    )
    assert torch.equal(a.kl, b.kl)
    assert torch.equal(b.loss, b.policy.loss)
    torch.testing.assert_close(a.loss, b.loss + 0.5 * b.kl)
    without = token_losses(new, old, advantages, mask, algorithm=outside)
    assert torch.equal(without.loss, b.loss)
    assert not without.kl.any()


def test_importance_weights_multiply_the_policy_loss_alone():
    new, old, reference, lengths, advantages = random_case()
    mask = torch.arange(7)[None] < lengths[:, None]
    weights = torch.rand(5, 7, dtype=torch.float64).requires_grad_()
    algorithm, leaf = AlgorithmConfig(kl_coef=0.5), new.clone().requires_grad_()
    plain = token_losses(new, old, advantages, mask, algorithm=algorithm, reference_logprobs=reference)
    weighted = token_losses(
        leaf, old, advantages, mask, algorithm=algorithm, reference_logprobs=reference, importance_weights=weights
    )
    torch.testing.assert_close(weighted.policy.loss, plain.policy.loss * weights.detach())
    torch.testing.assert_close(weighted.loss.detach(), plain.policy.loss * weights.detach() + 0.5 * plain.kl)
    weighted.loss.sum().backward()
    assert weights.grad is None


def test_value_loss_by_hand():
    # Old values 0, clip 0.5: value 1 counts as 0.5 where that is worse (return 2), and as itself where not (return 0).
    values = f64([[1.0, 1.0, 0.2]]).requires_grad_()
    loss = clipped_value_loss(values, torch.zeros(1, 3), f64([[2.0, 0.0, 1.0]]), 0.5)
    torch.testing.assert_close(loss.detach(), f64([[1.125, 0.5, 0.32]]), rtol=0, atol=1e-15)
    loss.sum().backward()
    torch.testing.assert_close(values.grad, f64([[0.0, 1.0, -0.8]]), rtol=0, atol=1e-15)
    free = clipped_value_loss(values.detach(), torch.zeros(1, 3), f64([[2.0, 0.0, 1.0]]), None)
    torch.testing.assert_close(free, f64([[0.5, 0.5, 0.32]]), rtol=0, atol=1e-15)
