"""One pass over the head gives the gradients and the sums that the loss of whole responses has."""

import pytest
import torch

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.learning.batching import collate
from tasks.learning.loss import token_weights
from tasks.learning.pass_loss import PassLoss
from tasks.learning.step import accumulate

pytestmark = pytest.mark.slow

ALGORITHMS = {
    "clip": {},
    "dual clip": {"clip_ratio_c": 1.5, "loss_agg_mode": "seq-mean-token-mean"},
    "cispo": {"policy_loss": "cispo", "loss_agg_mode": "seq-mean-token-sum-norm"},
    "reinforce": {"policy_loss": "reinforce"},
    "kl": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "sampler": {"old_logprobs": "sampler", "importance_sampling": "none"},
    "importance": {"importance_sampling": "token", "importance_sampling_cap": 1.2},
    "gspo": {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "sequence mask": {"importance_sampling": "sequence-mask"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("later_step", [True, False])
@pytest.mark.parametrize("double", [True, False])
def test_gradients_and_loss_are_those_of_plain_logprobs(build, ragged, name, per_token, later_step, double):
    algorithm = AlgorithmConfig(**ALGORITHMS[name])
    dtype, generator = torch.float64 if double else torch.float32, torch.Generator().manual_seed(5)
    policy, plain, reference = build(double=double), build(double=double), build(double=double, trainable=False)
    responses, prompts, completions, _ = ragged(6)
    with torch.no_grad():
        for parameter in reference.parameters().values():
            parameter.mul_(1.02)
        own = plain.logprobs(collate(*ragged(6)), 0.9)[0]
    # Near the policy's own, so that some ratios are clipped and some are not.
    near = own + 0.2 * torch.randn(own.shape, generator=generator, dtype=dtype)
    sampler = [row[: len(ids)].tolist() for row, ids in zip(near, completions, strict=True)]
    batch = collate(responses, prompts, completions, sampler)
    first = own + 0.2 * torch.randn(own.shape, generator=generator, dtype=dtype) if later_step else None
    advantages = torch.randn(own.shape if per_token else (6,), generator=generator, dtype=dtype)
    totals = accumulate(
        policy, batch, advantages, algorithm,
        temperature=0.9, max_completion_length=12, reference=reference, first_logprobs=first,
    )  # fmt: skip

    weights = token_weights(batch.lengths, algorithm.loss_agg_mode, 12)[:, None]
    mode = None if algorithm.importance_sampling in ("none", "auto") else algorithm.importance_sampling
    loss = PassLoss(
        algorithm, mode, weights, advantages, batch.response_mask, batch.sampler_logprobs, first,
        reference.logprobs(batch, 0.9)[0],
    )  # fmt: skip
    assert loss.is_by_token is (name not in ("gspo", "sequence mask"))
    expected = loss.of_responses(plain.logprobs(batch, 0.9)[0])
    expected.backward()
    assert totals.loss == pytest.approx(float(expected.detach()), rel=1e-12 if double else 1e-5, abs=1e-12)
    # Of all parameters together: some have no gradient but rounding.
    pairs = [(policy.parameters()[key].grad, parameter.grad) for key, parameter in plain.parameters().items()]
    ours, theirs = (torch.cat([gradient.flatten() for gradient in each]) for each in zip(*pairs, strict=True))
    assert float((ours - theirs).norm() / theirs.norm()) < (1e-10 if double else 1e-6)
