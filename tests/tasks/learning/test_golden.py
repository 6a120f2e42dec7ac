"""Our numbers beside those that TRL and verl gave for the same batches; tests/data/golden/make_golden.py wrote them."""

import hashlib
import json
import math
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.learning import advantage, importance, loss, returns, shaping

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
STEMS = ["advantages", "importance_weights", "kl", "overlong", "policy_losses", "value_losses"]
EXACT = 1e-12
# verl adds 1e-8 to the length of a response when it averages over its tokens, and to the count when it normalises.
VERL_COUNTS = 1e-8


def golden(stem):
    return json.loads((GOLDEN / f"{stem}.json").read_text(encoding="utf-8"))


def cases(stem, *path):
    section = golden(stem)
    for name in path:
        section = section[name]
    names = ("peer", "loss_type", "policy_loss", "estimator", "mode", "aggregation", "value_clip", "eps", "gamma")
    names += ("clip_ratio_low", "clip_ratio_c", "kl_coef", "importance_sampling", "truncated", "min", "max")
    inputs = section["inputs"]
    return [
        pytest.param(inputs, case, id=" ".join(f"{name}={case[name]}" for name in names if case.get(name) is not None))
        for case in section["cases"]
    ]


def padded(rows, padding):
    """[B, T] float64 of a list per response, with something absurd outside."""
    longest = max(map(len, rows)) + 1
    return torch.tensor([row + [padding] * (longest - len(row)) for row in rows], dtype=torch.float64)


def mask_of(rows):
    return torch.isfinite(padded(rows, torch.nan))


def close(actual, rows, tolerance):
    """A [B, T] equals a list per response, and is zero outside."""
    torch.testing.assert_close(actual, padded(rows, 0.0), rtol=0, atol=tolerance)


def loss_tolerance(case):
    averages = case["peer"] == "verl" and case["aggregation"] == "seq-mean-token-mean"
    return VERL_COUNTS if averages else EXACT


def eps_of_verl(values):
    """What added to the standard deviation does as much as the 1e-8 that verl adds to the variance."""
    deviation = values.std().item()
    return math.sqrt(deviation**2 + 1e-8) - deviation


def aggregated(losses, mask, mode, max_completion_length):
    lengths = mask.sum(dim=1)
    weights = loss.token_weights(lengths, mode, max_completion_length)
    total = (losses.masked_fill(~mask, 0.0) * weights[:, None]).sum()
    return total / loss.denominator(mode, int(lengths.sum()), int((lengths > 0).sum()))


def policy_loss(inputs, case, logprobs):
    """The token losses of a case, and the mask of what is trained."""
    mask = mask_of(inputs["logprobs"])
    old, sampler = padded(inputs["old_logprobs"], -1.0), padded(inputs["sampler_logprobs"], -9.0)
    weights = None
    if "importance_sampling" in case:
        ratios = importance.log_ratios(old, sampler, mask)
        weights = importance.importance_weights(case["importance_sampling"], ratios, inputs["cap"])
    truncated = torch.tensor([row in case.get("truncated", []) for row in range(len(mask))])
    mask = mask & ~truncated[:, None]
    algorithm = AlgorithmConfig(
        policy_loss=case["policy_loss"],
        # Read by the aggregation alone, which is called with the mode of the case.
        loss_agg_mode="seq-mean-token-mean",
        clip_ratio_low=case["clip_ratio_low"],
        clip_ratio_high=case["clip_ratio_high"],
        clip_ratio_c=case.get("clip_ratio_c"),
        kl_coef=case.get("kl_coef", 0.0),
    )
    token_losses = loss.token_losses(
        logprobs,
        old,
        torch.tensor(inputs["advantages"], dtype=torch.float64),
        mask,
        algorithm=algorithm,
        reference_logprobs=padded(inputs["reference_logprobs"], -7.0) if "kl_coef" in case else None,
        importance_weights=weights,
    )
    return token_losses, mask


@pytest.mark.parametrize(("inputs", "case"), cases("policy_losses"))
def test_policy_loss_and_gradient(inputs, case):
    logprobs = padded(inputs["logprobs"], -5.0).requires_grad_()
    losses, mask = policy_loss(inputs, case, logprobs)
    value = aggregated(losses.loss, mask, case["aggregation"], inputs["max_completion_length"])
    value.backward()
    assert value.item() == pytest.approx(case["value"], rel=0, abs=loss_tolerance(case))
    close(logprobs.grad, case["gradient"], loss_tolerance(case))


def test_the_batch_reaches_every_branch():
    inputs = golden("policy_losses")["inputs"]
    clip = {"policy_loss": "clip", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    logprobs = padded(inputs["logprobs"], -5.0)
    for case in (clip, clip | {"policy_loss": "gspo"}, clip | {"policy_loss": "cispo"}):
        policy = policy_loss(inputs, case, logprobs)[0].policy
        assert policy.clipped_low.any()
        assert policy.clipped_high.any()
        assert (policy.ratio.ne(0) & ~policy.clipped_low & ~policy.clipped_high).any()
    plain, dual = (policy_loss(inputs, case, logprobs)[0].loss for case in (clip, clip | {"clip_ratio_c": 3.0}))
    assert (dual < plain).any()
    # Weights are capped, and responses dropped at either end and kept.
    ratios = golden("importance_weights")["inputs"]
    mask = mask_of(ratios["old_logprobs"])
    log_ratios = importance.log_ratios(*(padded(ratios[name], -1.0) for name in ratios), mask)
    assert (log_ratios.exp() > 3).any()
    whole = log_ratios.sum(dim=1).exp()
    assert (whole < 1 / 3).any()
    assert (whole > 3).any()
    assert ((whole > 1 / 3) & (whole < 3)).any()


@pytest.mark.parametrize(("inputs", "case"), cases("kl"))
def test_kl_and_gradient(inputs, case):
    mask = mask_of(inputs["logprobs"])
    logprobs = padded(inputs["logprobs"], -5.0).requires_grad_()
    kl = loss.kl_penalty(logprobs, padded(inputs["reference_logprobs"], -7.0), case["estimator"]).masked_fill(~mask, 0)
    kl.sum().backward()
    close(kl.detach(), case["tokens"], EXACT)
    assert kl.sum().item() == pytest.approx(case["value"], rel=0, abs=EXACT)
    close(logprobs.grad, case["gradient"], EXACT)


def test_kl_in_the_reward():
    contents = golden("kl")
    inputs, case = contents["inputs"], contents["in_reward"]
    kl = loss.kl_penalty(
        padded(inputs["logprobs"], -5.0), padded(inputs["reference_logprobs"], -7.0), case["estimator"]
    )
    rewards = torch.tensor(inputs["rewards"], dtype=torch.float64)
    close(
        returns.token_rewards(rewards, mask_of(inputs["logprobs"]), kl, case["kl_coef"]), case["token_rewards"], EXACT
    )


@pytest.mark.parametrize(("inputs", "case"), cases("advantages", "outcome"))
def test_response_advantages(inputs, case):
    rewards = torch.tensor(inputs["rewards"], dtype=torch.float64)
    size, eps, tolerance = inputs["num_generations"], case["eps"] or 0.0, EXACT
    estimator, _, scale = case["estimator"].partition("grpo-")
    if scale:
        actual = advantage.group_advantages(rewards, size, scale, eps)
    elif estimator == "rloo":
        actual = advantage.leave_one_out_advantages(rewards, size)
    else:
        assert estimator == "reinforce-plus-plus-baseline"
        tolerance, eps = VERL_COUNTS, eps_of_verl(advantage.group_advantages(rewards, size, "none", 0.0))
        actual = advantage.reinforce_plus_plus_baseline_advantages(rewards, torch.ones_like(rewards), size, eps)
    expected = torch.tensor(case["advantages"], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("inputs", "case"), cases("advantages", "token"))
def test_token_advantages(inputs, case):
    rewards, mask = padded(inputs["token_rewards"], 11.0), mask_of(inputs["token_rewards"])
    if case["estimator"] == "reinforce-plus-plus-baseline":
        scores, lengths = rewards.masked_fill(~mask, 0.0).sum(dim=1), mask.sum(dim=1)
        size = case["num_generations"]
        eps = eps_of_verl(advantage.group_advantages(scores, size, "none", 0.0).repeat_interleave(lengths))
        per_response = advantage.reinforce_plus_plus_baseline_advantages(scores, lengths, size, eps)
        close(per_response[:, None] * mask, case["whitened_advantages"], VERL_COUNTS)
        return
    if case["estimator"] == "gae":
        values = padded(inputs["values"], 13.0)
        raw, following = returns.gae(rewards, values, mask, gamma=case["gamma"], gae_lambda=case["gae_lambda"])
        close(raw + values.masked_fill(~mask, 0.0), case["returns"], EXACT)
        advantages = returns.normalised(raw, mask, eps_of_verl(raw[mask]))
    else:
        eps = eps_of_verl(returns.discounted_returns(rewards, mask, case["gamma"])[mask])
        advantages, following = advantage.reinforce_plus_plus_advantages(rewards, mask, case["gamma"], eps)
    close(following, case["returns"], EXACT)
    close(advantages, case["whitened_advantages"], VERL_COUNTS)


@pytest.mark.parametrize(("inputs", "case"), cases("value_losses"))
def test_value_loss_and_gradient(inputs, case):
    mask = mask_of(inputs["values"])
    values = padded(inputs["values"], 13.0).requires_grad_()
    old, target = padded(inputs["old_values"], 3.0), padded(case["returns"], -3.0)
    losses = loss.clipped_value_loss(values, old, target, case["value_clip"])
    value = aggregated(losses, mask, case["aggregation"], inputs["max_completion_length"])
    value.backward()
    assert value.item() == pytest.approx(case["value"], rel=0, abs=loss_tolerance(case))
    close(values.grad, case["gradient"], loss_tolerance(case))


@pytest.mark.parametrize(("inputs", "case"), cases("importance_weights"))
def test_importance_weights(inputs, case):
    mask = mask_of(inputs["old_logprobs"])
    old, sampler = padded(inputs["old_logprobs"], -5.0), padded(inputs["sampler_logprobs"], -1.0)
    ratios = importance.log_ratios(old, sampler, mask)
    if case["mode"] == "token-truncate":
        weights = importance.truncated_token_weights(ratios, case["max"])
    else:
        weights = importance.masked_sequence_weights(ratios, case["max"], case["min"] or 0.0)
    if case["mode"] == "sequence-keep":
        # verl drops the same responses, and gives the others no weight of their own.
        weights = (weights > 0).double()
    close(weights * mask, case["weights"], EXACT)
    if "effective_sample_fraction" in case:
        # verl adds 1e-8 to the mean of the weights.
        expected = pytest.approx(case["effective_sample_fraction"], rel=5e-8)
        counted = weights[mask]
        sums = float(counted.sum()), float(counted.square().sum())
        assert importance.effective_sample_size(len(counted), *sums) == expected


@pytest.mark.parametrize(("inputs", "case"), cases("overlong"))
def test_overlong_penalties(inputs, case):
    lengths = torch.tensor(inputs["lengths"])
    limit, buffer_length = inputs["max_completion_length"], inputs["buffer_length"]
    actual = shaping.overlong_penalties(lengths, limit, buffer_length, case["penalty_factor"])
    assert actual.tolist() == pytest.approx(case["penalties"], rel=0, abs=EXACT)


@pytest.mark.parametrize("stem", STEMS)
def test_values_are_those_of_the_present_scripts(stem):
    sources = b"".join(path.read_bytes() for path in sorted(GOLDEN.glob("*.py")))
    assert golden(stem)["made_by"]["sources_sha256"] == hashlib.sha256(sources).hexdigest(), "run make_golden.py again"


def missing_peers():
    """What is not installed as the golden values need it, or ''."""
    made_by = golden("kl")["made_by"]
    missing = []
    for package in ("trl", "verl"):
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "none"
        if found != made_by[package]:
            missing.append(f"{package} {made_by[package]} (found: {found})")
    return ", ".join(missing)


@pytest.mark.peers
def test_peers_give_the_same_values_again(tmp_path):
    if missing_peers():
        pytest.skip(f"needs {missing_peers()}; tests/data/golden/make_golden.py says how to install them")
    subprocess.run([sys.executable, GOLDEN / "make_golden.py", "--out", tmp_path], check=True, timeout=600)
    assert sorted(path.stem for path in tmp_path.iterdir()) == STEMS
    for stem in STEMS:
        again = json.loads((tmp_path / f"{stem}.json").read_text(encoding="utf-8"))
        kept = golden(stem)
        # Another torch may round differently; everything else is to be equal.
        again["made_by"].pop("torch")
        kept["made_by"].pop("torch")
        same(again, kept, stem)


def same(actual, expected, where):
    """Two JSON values are equal, numbers to within EXACT."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            same(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            same(actual[index], value, f"{where}[{index}]")
    else:
        assert actual == (pytest.approx(expected, abs=EXACT) if isinstance(expected, float) else expected), where
