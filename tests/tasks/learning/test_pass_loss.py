"""One pass over the head gives the gradients and the sums that the loss of whole responses has."""

import itertools

import pytest
import torch

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.learning.batching import collate
from tasks.learning.loss import token_weights
from tasks.learning.pass_loss import PassLoss
from tasks.learning.step import accumulate
from tests.covering import covering

ALGORITHMS = {
    "clip": {},
    "dual clip": {"clip_ratio_c": 1.5, "loss_agg_mode": "seq-mean-token-mean"},
    "cispo": {"policy_loss": "cispo", "loss_agg_mode": "seq-mean-token-sum-norm"},
    "reinforce": {"policy_loss": "reinforce"},
    "kl": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "sampler": {"old_logprobs": "sampler", "importance_sampling": "none"},
    "importance": {"importance_sampling": "token", "importance_sampling_cap": 1.2},
    "gspo": {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "own": {"policy_loss": "tests.own_losses:clipped"},
    "own of responses": {"policy_loss": "tests.own_losses:of_whole_responses"},
    "sequence mask": {"importance_sampling": "sequence-mask"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "per_token", "later_step", "double"), covering(ALGORITHMS, [True, False], [True, False], [True, False])
)
def test_gradients_and_loss_are_those_of_plain_logprobs(build, ragged, name, per_token, later_step, double):
    algorithm = AlgorithmConfig(**ALGORITHMS[name])
    dtype, generator = torch.float64 if double else torch.float32, torch.Generator().manual_seed(5)
    policy, plain, reference = build(double=double), build(double=double), build(double=double, trainable=False)
    responses, prompts, completions, _ = ragged(6)
    # Two turns where there is room, so that tokens within responses are not trained.
    origins = [(1, 1, len(row) - 2) if len(row) > 2 else (len(row),) for row in completions]
    with torch.no_grad():
        for parameter in reference.parameters().values():
            parameter.mul_(1.02)
        own = plain.logprobs(collate(*ragged(6)), 0.9)[0]
    # Near the policy's own, so that some ratios are clipped and some are not.
    near = own + 0.2 * torch.randn(own.shape, generator=generator, dtype=dtype)
    sampler = [row[: len(ids)].tolist() for row, ids in zip(near, completions, strict=True)]
    sampler = [row[:1] + row[2:] if len(row) > 2 else row for row in sampler]
    batch = collate(responses, prompts, completions, sampler, origins)
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
    whole = name.startswith(("own", "sequence mask"))
    assert loss.is_by_token is (not whole and (name != "gspo" or not later_step))
    expected = loss.weighted(plain.logprobs(batch, 0.9)[0]).sum()
    expected.backward()
    assert totals.loss == pytest.approx(float(expected.detach()), rel=1e-12 if double else 1e-5, abs=1e-12)
    # Of all parameters together: some have no gradient but rounding.
    pairs = [(policy.parameters()[key].grad, parameter.grad) for key, parameter in plain.parameters().items()]
    ours, theirs = (torch.cat([gradient.flatten() for gradient in each]) for each in zip(*pairs, strict=True))
    assert float((ours - theirs).norm() / theirs.norm()) < (1e-10 if double else 1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("later_step", [True, False])
def test_parts_of_the_tokens_have_the_losses_of_whole_responses(ragged, name, later_step):
    algorithm, generator = AlgorithmConfig(**ALGORITHMS[name]), torch.Generator().manual_seed(1)
    responses, prompts, completions, _ = ragged(7, seed=2)
    # The first, the last and one between have no token that is trained.
    origins = [(0, len(row)) if index % 3 == 0 else (len(row),) for index, row in enumerate(completions)]
    sampler = [[-1.0] * sum(lengths[::2]) for lengths in origins]
    batch = collate(responses, prompts, completions, sampler, origins)
    assert batch.trained_lengths == tuple(map(len, sampler))
    mask = batch.response_mask

    def near():
        return -1 + 0.2 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    mode = algorithm.importance_sampling if algorithm.importance_sampling in ("token", "sequence-mask") else None
    loss = PassLoss(
        algorithm, mode, token_weights(batch.lengths, algorithm.loss_agg_mode, 12)[:, None], near()[:, 0], mask,
        batch.sampler_logprobs, near() if later_step else None, near(),
    )  # fmt: skip
    logprobs = near()
    expected = loss.weighted(logprobs).flatten()[batch.trained]
    of_tokens, together = loss.of_tokens(batch)
    assert bool(together) is not loss.is_by_token
    flat = logprobs.flatten()[batch.trained]
    bounds = [0, *itertools.accumulate(together or [1] * len(flat))]
    for count in (1, 2, len(bounds)):
        parts = [slice(*pair) for pair in itertools.pairwise([*bounds[:-1:count], len(flat)]) if pair[0] < pair[1]]
        found = torch.cat([of_tokens(flat[part], part) for part in parts])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
