"""What verl makes of the batch."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from golden_batch import (
    AGGREGATIONS,
    CAP,
    CLIP_HIGH,
    CLIP_LOW,
    KL_COEF,
    LENGTHS,
    MAX_COMPLETION_LENGTH,
    NO_CLIP,
    RESPONSES_PER_GROUP,
    Batch,
    Golden,
    differentiated,
    listed,
)
from torch import Tensor
from verl.experimental.reward_loop.reward_manager import DAPORewardManager
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig


def actor_config(settings: Golden) -> Any:
    norm = {"loss_scale_factor": MAX_COMPLETION_LENGTH} if settings["aggregation"].endswith("-norm") else {}
    return ActorConfig(
        strategy="fsdp",
        rollout_n=RESPONSES_PER_GROUP,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=settings["clip_ratio_low"],
        clip_ratio_high=settings["clip_ratio_high"],
        clip_ratio_c=settings.get("clip_ratio_c") or NO_CLIP,
        global_batch_info=norm,
    )


def policy_loss(batch: Batch, settings: Golden) -> Golden:
    losses = {"clip": "vanilla", "gspo": "gspo", "cispo": "cispo"}
    name = settings["policy_loss"]
    mask, weights = batch.mask.clone(), None
    mask[settings.get("truncated", [])] = 0.0
    if settings.get("importance_sampling"):
        log_ratio = batch.old_logprobs - batch.sampler_logprobs
        weights, _ = compute_rollout_correction_weights(log_ratio, batch.mask, "token", CAP)
    keywords = {
        "advantages": batch.advantages[:, None].expand_as(batch.mask),
        "response_mask": mask,
        "loss_agg_mode": settings["aggregation"],
        "config": actor_config(settings),
        "rollout_is_weights": weights,
    }

    def loss(logprobs: Tensor) -> Tensor:
        if name == "reinforce":
            return core_algos.compute_policy_loss_reinforce(batch.sampler_logprobs, logprobs, **keywords)[0]
        return core_algos.get_policy_loss_fn(losses[name])(batch.old_logprobs, logprobs, **keywords)[0]

    return {"peer": "verl", **settings, **differentiated(loss, batch.logprobs)}


def policy_losses(batch: Batch) -> list[Golden]:
    clip = {"clip_ratio_low": CLIP_LOW, "clip_ratio_high": CLIP_HIGH}
    cases = [
        {"policy_loss": name, "aggregation": aggregation, **clip}
        for name in ("clip", "gspo", "cispo", "reinforce")
        for aggregation in AGGREGATIONS
    ]
    cases += [{"policy_loss": "clip", "aggregation": mode, "clip_ratio_c": 3.0, **clip} for mode in AGGREGATIONS]
    cases += [{"policy_loss": "clip", "aggregation": mode, "truncated": [0, 3], **clip} for mode in AGGREGATIONS]
    cases += [
        {"policy_loss": "cispo", "aggregation": "token-mean", "clip_ratio_low": 1.0, "clip_ratio_high": CLIP_HIGH},
        {"policy_loss": "clip", "aggregation": "token-mean", "importance_sampling": "token", **clip},
    ]
    return [policy_loss(batch, case) for case in cases]


def estimated(name: str, function: Callable[..., Any], batch: Golden, **keywords: Any) -> Golden:
    """An estimator of one reward per response; with one token each, tokens and responses weigh alike."""
    per_token = torch.tensor(batch["rewards"])[:, None]
    group = np.repeat(np.arange(len(per_token) // batch["num_generations"]), batch["num_generations"])
    advantages, _ = function(per_token, torch.ones_like(per_token), index=group, **keywords)
    return {"peer": "verl", "estimator": name, "eps": keywords.get("epsilon"), "advantages": advantages[:, 0].tolist()}


def outcome_advantages(batch: Golden) -> list[Golden]:
    grpo, rloo = core_algos.compute_grpo_outcome_advantage, core_algos.compute_rloo_outcome_advantage
    baseline = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage
    cases = [estimated("grpo-group", grpo, batch, epsilon=eps) for eps in (1e-8, 1e-6, 1e-4)]
    return [
        *cases,
        estimated("grpo-none", grpo, batch, norm_adv_by_std_in_grpo=False),
        estimated("rloo", rloo, batch),
        estimated("reinforce-plus-plus-baseline", baseline, batch),
    ]


def token_advantages(batch: Batch) -> list[Golden]:
    """verl whitens what it returns as advantages: (a - mean) / sqrt(variance + 1e-8), over all tokens of the batch."""

    cases = []
    for gamma in (1.0, 0.9):
        config = SimpleNamespace(gamma=gamma)
        whitened, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            batch.token_rewards, batch.mask, config=config
        )
        cases.append({"estimator": "reinforce-plus-plus", "gamma": gamma, "gae_lambda": None})
        cases[-1] |= {"returns": listed(returns), "whitened_advantages": listed(whitened)}
    for gamma, gae_lambda in ((1.0, 1.0), (0.99, 0.95)):
        whitened, returns = core_algos.compute_gae_advantage_return(
            batch.token_rewards, batch.values, batch.mask, gamma, gae_lambda
        )
        cases.append({"estimator": "gae", "gamma": gamma, "gae_lambda": gae_lambda})
        cases[-1] |= {"returns": listed(returns), "whitened_advantages": listed(whitened)}
    group = np.arange(len(LENGTHS)) // RESPONSES_PER_GROUP
    whitened, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        batch.token_rewards, batch.mask, index=group
    )
    cases.append({"estimator": "reinforce-plus-plus-baseline", "num_generations": RESPONSES_PER_GROUP})
    cases[-1] |= {"whitened_advantages": listed(whitened)}
    return [{"peer": "verl", **case} for case in cases]


def value_losses(batch: Batch) -> list[Golden]:
    returns = batch.values + 0.8 * batch.token_rewards.sign() * batch.mask

    def case(clip: float | None, aggregation: str) -> Golden:
        def loss(values: Tensor) -> Tensor:
            return core_algos.compute_value_loss(
                values,
                returns,
                batch.old_values,
                batch.mask,
                clip or NO_CLIP,
                aggregation,
                loss_scale_factor=MAX_COMPLETION_LENGTH,
            )[0]

        settings = {"peer": "verl", "value_clip": clip, "aggregation": aggregation, "returns": listed(returns)}
        return settings | differentiated(loss, batch.values)

    return [case(0.2, mode) for mode in AGGREGATIONS] + [case(None, "token-mean")]


def kl(batch: Batch) -> list[Golden]:
    cases = []
    for estimator in ("k1", "k2", "k3"):

        def total(logprobs: Tensor, estimator: str = estimator) -> Tensor:
            return (core_algos.kl_penalty(logprobs, batch.reference_logprobs, estimator) * batch.mask).sum()

        tokens = listed(core_algos.kl_penalty(batch.logprobs, batch.reference_logprobs, estimator))
        cases.append({"peer": "verl", "estimator": estimator, "tokens": tokens})
        cases[-1] |= differentiated(total, batch.logprobs)
    return cases


def kl_in_reward(batch: Batch) -> Golden:
    """Token rewards: the response's with its last token, minus the k1 of every token; verl's PPO knows no other."""
    scores = torch.zeros_like(batch.mask)
    scores[range(len(LENGTHS)), [length - 1 for length in LENGTHS]] = batch.rewards
    rewards = core_algos.compute_rewards(scores, batch.logprobs, batch.reference_logprobs, KL_COEF)
    return {"peer": "verl", "estimator": "k1", "kl_coef": KL_COEF, "token_rewards": listed(rewards)}


def importance_weights(batch: Batch) -> list[Golden]:
    log_ratio = batch.old_logprobs - batch.sampler_logprobs
    cases = []
    for cap in (CAP, 1.5):
        weights, metrics = compute_rollout_correction_weights(log_ratio, batch.mask, "token", cap)
        size = metrics["rollout_is_eff_sample_size"]
        cases.append({"mode": "token-truncate", "min": None, "max": cap, "weights": listed(weights)})
        cases[-1]["effective_sample_fraction"] = size
    kept, _ = compute_rollout_rejection_mask(log_ratio, batch.mask, "seq_sum_k1", f"{1 / CAP!r}_{CAP!r}")
    cases.append({"mode": "sequence-keep", "min": 1 / CAP, "max": CAP, "weights": listed(kept)})
    return [{"peer": "verl", **case} for case in cases]


async def overlong(lengths: list[int], buffer_length: int, factor: float) -> list[float]:
    """The part of the DAPO reward manager's reward that the length is to blame for: everything else is worth 0."""

    async def nothing(**_: Any) -> float:
        return 0.0

    manager = SimpleNamespace(
        loop=asyncio.get_running_loop(),
        tokenizer=SimpleNamespace(decode=lambda *_, **__: ""),
        reward_router_address=None,
        is_async_reward_score=True,
        compute_score=nothing,
        max_resp_len=MAX_COMPLETION_LENGTH,
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=buffer_length, penalty_factor=factor, log=False),
    )
    penalties = []
    for length in lengths:
        tensors = {
            "responses": torch.zeros(MAX_COMPLETION_LENGTH),
            "attention_mask": (torch.arange(MAX_COMPLETION_LENGTH) < length).long(),
        }
        rest = {"data_source": "", "reward_model": {"ground_truth": ""}}
        data = [SimpleNamespace(batch=tensors, non_tensor_batch=rest)]
        penalties.append(float((await DAPORewardManager.run_single(manager, data))["reward_score"]))
    return penalties
