"""Losses of the user's own: equal to the built-in ones that they write anew, and refused where they do not fit."""

from pathlib import Path

import pytest
import torch

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.learning.batching import collate
from tasks.learning.loss import token_losses
from tasks.learning.step import accumulate
from tasks.learning.totals import StepTotals, measure
from tests.test_docs import blocks

GUIDE = Path(__file__).parents[3] / "docs/guide/algorithms.md"

SHAPE = (5, 7)


def own(name, **fields):
    return AlgorithmConfig(policy_loss=f"tests.own_losses:{name}", **fields)


def case(seed=0):
    """Log-probs, old log-probs and a mask; what lies outside the mask is NaN."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(SHAPE[1])[None] < torch.tensor([[7], [3], [1], [5], [6]])
    new, old = (-torch.rand(SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))
    return new.masked_fill(~mask, torch.nan), old.masked_fill(~mask, torch.nan), mask


def losses_of(algorithm, advantages, new, old, mask):
    leaf = new.clone().requires_grad_()
    found = token_losses(leaf, old, advantages, mask, algorithm=algorithm)
    found.loss.sum().backward()
    return found, leaf.grad


@pytest.mark.parametrize("shape", [(5,), SHAPE], ids=["per response", "per token"])
@pytest.mark.parametrize(
    ("name", "built_in"),
    [("clipped", {}), ("of_whole_responses", {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"})],
)
def test_an_own_loss_is_the_built_in_one_that_it_writes_anew(name, built_in, shape):
    advantages = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, gradient = losses_of(AlgorithmConfig(**built_in, clip_ratio_low=0.1), advantages, *case())
    theirs, their_gradient = losses_of(own(name, clip_ratio_low=0.1), advantages, *case())
    torch.testing.assert_close(theirs.loss, ours.loss, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(their_gradient, gradient, rtol=1e-14, atol=1e-14)
    assert float(gradient.abs().max()) > 0.1
    if name == "clipped":
        assert torch.equal(theirs.policy.clipped_low, ours.policy.clipped_low)
        assert torch.equal(theirs.policy.clipped_high, ours.policy.clipped_high)
        assert torch.equal(theirs.policy.ratio, ours.policy.ratio)
    else:
        assert not theirs.policy.clipped_low.any()


def totals_of(rows):
    new, old, mask = (each[rows] for each in case())
    filled = new.masked_fill(~mask, 0.0)
    losses = token_losses(new, old, torch.ones(len(new)), mask, algorithm=own("clipped"))
    return measure(
        responses=tuple(rows), losses=losses, weights=torch.ones(len(new), 1), logprobs=filled, first_logprobs=filled,
        old_logprobs=filled, sampler_logprobs=filled, entropy=filled, response_mask=mask,
    )  # fmt: skip


def test_a_metric_of_an_own_loss_is_the_mean_over_trained_tokens_however_the_step_is_divided():
    new, old, mask = case()
    expected = float((new - old).exp()[mask].mean())
    whole, parts = totals_of(range(5)), sum((totals_of(rows) for rows in ([3], [0, 4], [1, 2])), StepTotals())
    for totals in (whole, parts):
        assert totals.metrics("token-mean")["loss/ratio"] == pytest.approx(expected, rel=1e-12)
    assert parts.metrics("token-mean") == pytest.approx(whole.metrics("token-mean"), rel=1e-12)
    assert "loss/ratio" not in StepTotals(tokens=1, responses=(1,)).metrics("token-mean")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_tensor", "returned a Tensor; allowed: a LossOutputs"),
        ("of_responses", r"returned loss of shape \(5,\); allowed: a tensor of shape \(5, 7\)"),
        ("metric_of_a_number", r"returned metrics\['mean'\] of a float; allowed: a tensor of shape \(5, 7\)"),
        ("metric_with_a_slash", "returned the metric 'actor/mean'; allowed: names of small letters, digits and _"),
        ("numbers_for_clipped", "returned clipped_low in torch.float64; allowed: booleans"),
    ],
)
def test_what_an_own_loss_returns_is_verified(name, message):
    with pytest.raises(ValueError, match=f"^algorithm.policy_loss: 'tests.own_losses:{name}' {message}"):
        losses_of(own(name), torch.ones(5), *case())


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_an_own_loss_without_gradient_is_refused_also_where_a_kl_has_one(build, ragged, kl_coef):
    algorithm = AlgorithmConfig(policy_loss="tests.own_losses:without_gradient", kl_coef=kl_coef)
    with pytest.raises(
        ValueError, match=r"^algorithm.policy_loss: '.*:without_gradient' returned loss without gradient"
    ):
        accumulate(
            build(),
            collate(*ragged(3)),
            torch.ones(3),
            algorithm,
            temperature=1.0,
            max_completion_length=12,
            reference=build(trainable=False) if kl_coef else None,
        )


def test_a_metric_that_is_not_finite_ends_training_in_one_line(build, ragged):
    policy, batch = build(), collate(*ragged(3))
    message = (
        r"^algorithm.policy_loss: 'tests.own_losses:metric_that_is_not_finite' returned metrics\['gap'\] with -inf"
    )
    with pytest.raises(ValueError, match=message):
        accumulate(
            policy,
            batch,
            torch.ones(3),
            own("metric_that_is_not_finite"),
            temperature=1.0,
            max_completion_length=12,
        )
    assert all(parameter.grad is None for parameter in policy.parameters().values())


def test_the_loss_in_the_guide_runs(tmp_path, monkeypatch):
    [body] = blocks(GUIDE, "python", "own loss")
    (tmp_path / "guide_losses.py").write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    algorithm = AlgorithmConfig(policy_loss="guide_losses:softly_bounded")
    algorithm.loss.check()
    new, old, mask = case()
    found, gradient = losses_of(algorithm, torch.ones(5), new, old, mask)
    assert bool((gradient[mask] < 0).all())
    assert not gradient[~mask].any()
    assert bool((found.policy.metrics["weight"] < 2).all())
