import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.learning.advantage import group_advantages
from tasks.learning.batching import collate
from tasks.learning.optimizer import NonFiniteGradient, PolicyOptimizer
from tasks.learning.packing import pack
from tasks.learning.step import accumulate, apply, reference_kl
from tasks.learning.totals import StepTotals, combined
from tests.covering import covering
from tests.tasks.learning.tiny_model import VOCABULARY

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
LIMITS = {"temperature": 1.0, "max_completion_length": 12}


def gradients(policy):
    return {name: p.grad.clone() for name, p in policy.parameters().items()}


def accumulate_split(policy, rows, advantages, algorithm, *, split, reference=None):
    """Accumulate the rows in micro-batches of the given index lists; the divided gradient and the totals."""
    totals = []
    for part in split:
        batch = collate(*[[column[index] for index in part] for column in rows])
        totals.append(accumulate(policy, batch, advantages[part], algorithm, reference=reference, **LIMITS))
    total = combined(totals)
    divisor = total.denominator(algorithm.loss_agg_mode)
    return {name: gradient / divisor for name, gradient in gradients(policy).items()}, total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "sampling"),
    covering(MODES, [{"old_logprobs": "sampler"}, {"importance_sampling": "token"}], strength=1),
)
def test_any_split_into_micro_batches_gives_the_same_gradient_and_metrics(build, ragged, mode, sampling):
    rows, advantages = ragged(6), torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    algorithm = AlgorithmConfig(loss_agg_mode=mode, kl_coef=0.1, **sampling)
    reference = build(trainable=False, double=True)
    with torch.no_grad():
        for parameter in reference.parameters().values():
            parameter.mul_(1.05)
    splits = [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[4, 5], [0, 1, 2, 3]], [[0, 1, 2], [3, 4], [5]]]
    results = [
        accumulate_split(build(double=True), rows, advantages, algorithm, split=split, reference=reference)
        for split in splits
    ]
    whole, whole_totals = results[0]
    assert max(float(gradient.abs().max()) for gradient in whole.values()) > 1e-3
    for divided, totals in results[1:]:
        for name, gradient in whole.items():
            torch.testing.assert_close(divided[name], gradient, rtol=0, atol=1e-12)
        expected = whole_totals.metrics(mode) | {"padding_share": totals.metrics(mode)["padding_share"]}
        assert totals.metrics(mode) == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_the_trainers_own_ratio_is_exactly_one_and_blind_to_the_samplers_rounding(build, ragged):
    rows, advantages = ragged(4), torch.tensor([1.0, -1.0, 0.5, -0.5])
    shifted = (*rows[:3], [[value + 0.5 for value in row] for row in rows[3]])
    results = []
    for variant in (rows, shifted):
        policy = build()
        results.append(
            (accumulate(policy, collate(*variant), advantages, AlgorithmConfig(), **LIMITS), gradients(policy))
        )
    for totals, _ in results:
        metrics = totals.metrics("token-mean")
        assert metrics["ratio_max"] == 1.0
        assert metrics["actor/ppo_kl"] == metrics["clip_ratio/region_mean"] == 0.0
    assert results[0][0].mismatch_kl != results[1][0].mismatch_kl
    assert all(torch.equal(gradient, results[1][1][name]) for name, gradient in results[0][1].items())


def test_metrics_by_hand(build, ragged):
    policy, rows, algorithm = build(double=True), ragged(3), AlgorithmConfig(old_logprobs="sampler")
    batch = collate(*rows)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    totals = accumulate(policy, batch, advantages, algorithm, **LIMITS)
    logprobs, entropy = (value.detach() for value in policy.logprobs(batch, 1.0))
    mask, old = batch.response_mask, batch.sampler_logprobs.double()
    ratio = (logprobs - old).exp()
    low = ((ratio < 0.8) & (advantages[:, None] < 0) & mask).sum().double() / mask.sum()
    high = ((ratio > 1.28) & (advantages[:, None] > 0) & mask).sum().double() / mask.sum()
    surrogate = torch.minimum(ratio * advantages[:, None], ratio.clip(0.8, 1.28) * advantages[:, None])
    difference = (logprobs - old)[mask]
    expected = {
        "loss": -surrogate[mask].mean(),
        "actor/pg_loss": -surrogate[mask].mean(),
        "kl": 0.0,
        "entropy": entropy[mask].mean(),
        "actor/ppo_kl": -difference.mean(),
        "mismatch_kl": (difference.exp() - 1 - difference).mean(),
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "ratio_max": ratio[mask].max(),
        "num_tokens": mask.sum(),
        "padding_share": 1 - sum(batch.total_lengths) / batch.input_ids.numel(),
        "shared_prompt_share": 0.0,
        "trajectory_staleness": 0.0,
        "staleness_max": 0.0,
        "importance/ratio_min": ratio[mask].min(),
        "importance/ratio_max": ratio[mask].max(),
    }
    assert low > 0
    assert high > 0
    metrics = totals.metrics("token-mean")
    for name, fraction in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        exact = np.quantile(ratio[mask].numpy(), fraction, method="inverted_cdf")
        assert metrics.pop(f"importance/ratio_{name}") == pytest.approx(exact, rel=0.01)
    assert metrics == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-9, abs=1e-12)
    assert totals.responses == (0, 1, 2)


CAP = 1.5


@pytest.mark.parametrize("sampling", ["token", "sequence-mask"])
def test_importance_weights_multiply_the_policy_loss_of_their_tokens(build, ragged, sampling):
    """The gradient is that of the advantages times the weights, and the step's sums say what the weights were."""
    rows, advantages = near(build, ragged(6)), torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0], dtype=torch.float64)
    algorithm = AlgorithmConfig(importance_sampling=sampling, importance_sampling_cap=CAP)
    batch = collate(*rows)
    with torch.no_grad():
        ratio = (build(double=True).logprobs(batch, 1.0)[0] - batch.sampler_logprobs.double()).exp()
    mask = batch.response_mask
    if sampling == "token":
        over, weights = ratio > CAP, ratio.clamp(max=CAP)
    else:
        whole = ratio.where(mask, 1.0).prod(dim=1, keepdim=True).expand_as(ratio)
        over, weights = whole > CAP, whole.where(whole <= CAP, 0.0)
    assert 0 < over[mask].sum() < mask.sum()
    policy, by_hand = build(double=True), build(double=True)
    totals = accumulate(policy, batch, advantages, algorithm, **LIMITS)
    plain = accumulate(by_hand, batch, advantages[:, None] * weights, AlgorithmConfig(), **LIMITS)
    for name, gradient in gradients(by_hand).items():
        torch.testing.assert_close(gradients(policy)[name], gradient, rtol=0, atol=1e-12)
    trained = weights[mask]
    assert totals.metrics("token-mean") == pytest.approx(
        plain.metrics("token-mean")
        | {
            "importance/ess": float(trained.sum() ** 2 / (len(trained) * trained.square().sum())),
            "importance/weight_mean": float(trained.mean()),
            "importance/clipped_frac": float(over[mask].double().mean()),
        }
    )


def near(build, rows):
    """The rows with log-probs as of a sampler that differs a little from the policy."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        logprobs = build(double=True).logprobs(collate(*rows), 1.0)[0]
    noise = torch.randn(logprobs.shape, generator=generator, dtype=torch.float64) * 0.4
    return (*rows[:3], [row[: len(ids)].tolist() for row, ids in zip(logprobs + noise, rows[2], strict=True)])


def test_importance_weights_of_equal_policies_change_nothing(build, ragged):
    rows, advantages = ragged(4), torch.tensor([1.0, -1.0, 0.5, -0.5])
    policy, weighted = build(), build()
    with torch.no_grad():
        logprobs = policy.logprobs(collate(*rows), 1.0)[0]
    rows = (*rows[:3], [row[: len(ids)].tolist() for row, ids in zip(logprobs, rows[2], strict=True)])
    accumulate(policy, collate(*rows), advantages, AlgorithmConfig(), **LIMITS)
    totals = accumulate(weighted, collate(*rows), advantages, AlgorithmConfig(), same_engine=False, **LIMITS)
    assert all(torch.equal(gradient, gradients(weighted)[name]) for name, gradient in gradients(policy).items())
    metrics = totals.metrics("token-mean")
    assert (metrics["importance/ess"], metrics["importance/weight_mean"], metrics["importance/clipped_frac"]) == (
        1,
        1,
        0,
    )


def test_advantages_per_token_that_are_equal_are_those_of_the_response(build, ragged):
    batch, advantages = collate(*ragged(4)), torch.tensor([1.0, -1.0, 0.5, -0.5])
    results = []
    for given in (advantages, advantages[:, None].expand(batch.response_mask.shape)):
        policy = build()
        results.append((accumulate(policy, batch, given, AlgorithmConfig(), **LIMITS), gradients(policy)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(gradient, results[1][1][name]) for name, gradient in results[0][1].items())


def test_where_all_is_left_out_no_step_is_taken_not_even_by_what_was_learned_before(build, ragged):
    policy, batch = build(), collate(*ragged(2))
    optimizer = PolicyOptimizer(policy.parameters(), OptimizerConfig(learning_rate=1e-3, weight_decay=0.1))
    apply(
        optimizer, accumulate(policy, batch, torch.tensor([1.0, -1.0]), AlgorithmConfig(), **LIMITS), AlgorithmConfig()
    )
    before = {name: value.clone() for name, value in policy.tensors().items()}
    metrics = apply(optimizer, StepTotals(left_out=3), AlgorithmConfig())
    assert metrics["actor/grad_norm"] == metrics["actor/lr"] == metrics["loss"] == metrics["entropy"] == 0
    assert optimizer.steps == 1
    assert all(torch.equal(value, before[name]) for name, value in policy.tensors().items())


@pytest.mark.parametrize("old", ["trainer", "sampler"])
def test_the_kl_for_the_reward_is_of_the_policy_that_the_ratio_is_taken_to(build, ragged, old):
    policy, reference, batch = build(double=True), build(trainable=False, double=True), collate(*ragged(5))
    with torch.no_grad():
        for parameter in reference.parameters().values():
            parameter.mul_(1.1)
        expected = policy.logprobs(batch, 1.0)[0] if old == "trainer" else batch.sampler_logprobs.double()
        expected = expected - reference.logprobs(batch, 1.0)[0]
    algorithm = AlgorithmConfig(kl_in="reward", kl_coef=1.0, kl_estimator="k1", old_logprobs=old)
    found = reference_kl(policy, reference, batch, algorithm, temperature=1.0)
    torch.testing.assert_close(found[batch.response_mask], expected[batch.response_mask], rtol=0, atol=1e-12)
    assert all(parameter.grad is None for parameter in policy.parameters().values())


def test_the_first_kl_gradient_of_an_identical_reference_is_zero(build, ragged):
    policy, reference = build(double=True), build(trainable=False, double=True)
    algorithm = AlgorithmConfig(kl_coef=1.0)
    totals = accumulate(policy, collate(*ragged(2)), torch.zeros(2), algorithm, reference=reference, **LIMITS)
    assert totals.kl == 0.0
    assert max(float(gradient.abs().max()) for gradient in gradients(policy).values()) < 1e-12


def test_apply_takes_one_step_and_reports_it(build, ragged):
    policy = build()
    optimizer = PolicyOptimizer(policy.parameters(), OptimizerConfig(learning_rate=1e-3))
    before = {name: value.clone() for name, value in policy.tensors().items()}
    totals = accumulate(policy, collate(*ragged(4)), torch.tensor([1.0, -1.0, 1.0, -1.0]), AlgorithmConfig(), **LIMITS)
    metrics = apply(optimizer, totals, AlgorithmConfig())
    assert metrics["actor/lr"] == 1e-3
    assert metrics["actor/grad_norm"] > 0
    assert any(not torch.equal(value, before[name]) for name, value in policy.tensors().items())
    with pytest.raises(ValueError, match="0 responses with 0 tokens"):
        apply(optimizer, StepTotals(), AlgorithmConfig())


def test_a_non_finite_loss_names_its_responses_and_leaves_no_gradient(build, ragged):
    policy = build()
    advantages = torch.tensor([1.0, float("inf"), 1.0, float("nan")])
    with pytest.raises(NonFiniteGradient, match=r"non-finite loss; responses 1, 3$"):
        accumulate(policy, collate(*ragged(4)), advantages, AlgorithmConfig(), **LIMITS)
    assert all(p.grad is None for p in policy.parameters().values())
    with pytest.raises(ValueError, match=r"advantages: shape \(4,\); allowed: \[2\] or \[2, "):
        accumulate(policy, collate(*ragged(2)), advantages, AlgorithmConfig(), **LIMITS)


@pytest.mark.slow
def test_policy_gradient_lifts_a_toy_reward(build):
    """Reward: the fraction of low ids; one-token prompts, four-token completions sampled from the policy itself."""
    policy = build()
    optimizer = PolicyOptimizer(policy.parameters(), OptimizerConfig(learning_rate=0.01))
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(20):
        ids = torch.arange(8).repeat_interleave(8)[:, None]
        for _ in range(4):
            with torch.no_grad():
                probabilities = policy.module(input_ids=ids).logits[:, -1].softmax(dim=-1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
        rewards = (ids[:, 1:] < VOCABULARY // 4).float().mean(dim=1)
        means.append(float(rewards.mean()))
        batch = collate(range(64), ids[:, :1].tolist(), ids[:, 1:].tolist(), torch.zeros(64, 4).tolist())
        advantages = group_advantages(rewards, 8, "group", 1e-6)
        totals = accumulate(policy, batch, advantages, AlgorithmConfig(), **LIMITS)
        apply(optimizer, totals, AlgorithmConfig())
    assert sum(means[:3]) / 3 < 0.4
    assert sum(means[-3:]) / 3 > 0.8


class Waits(TorchDispatchMode):
    """The operators on a device's tensors whose result has a size or a value for which Python waits."""

    NAMES = ("nonzero", "masked_select", "_local_scalar_dense", "is_nonzero", "bincount", "unique", "equal")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        by_mask = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        if by_mask or any(name.startswith(each) for each in self.NAMES):
            self.found.append(name)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"importance_sampling": "token"},
        {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    ],
    ids=["clip", "weights", "gspo"],
)
def test_python_waits_for_a_device_only_to_read_the_totals(build, ragged, more, packed):
    policy, batch = build(), collate(*ragged(4))
    if packed:
        pack(policy.module)
    with Waits() as waits:
        accumulate(policy, batch, torch.ones(4), AlgorithmConfig(**more), **LIMITS)
    # Where it makes a mask, transformers looks whether positions begin again.
    assert waits.found == ([] if packed else ["_local_scalar_dense"])
