"""What TRL makes of the batch.

Its formulas are inside its trainer, whose methods are called here with a stand-in for the trainer.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from golden_batch import (
    CAP,
    CLIP_HIGH,
    CLIP_LOW,
    KL_COEF,
    LENGTHS,
    MAX_COMPLETION_LENGTH,
    RESPONSES_PER_GROUP,
    Batch,
    Golden,
    differentiated,
    listed,
)
from torch import Tensor
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment


class TrainerStandIn(SimpleNamespace):
    """What TRL's methods read of a trainer; whatever is not named here is off."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def trainer(**settings: Any) -> TrainerStandIn:
    accelerator = SimpleNamespace(
        gather=lambda tensor: tensor,
        reduce=lambda tensor, reduction: tensor,  # noqa: ARG005 - the accelerator's own parameter name
        num_processes=1,
        process_index=0,
        device=torch.device("cpu"),
    )
    args = {"delta": settings.pop("delta", None), "steps_per_generation": 1, "use_bias_correction_kl": False}
    return TrainerStandIn(
        **{
            "accelerator": accelerator,
            "args": TrainerStandIn(**args, gradient_accumulation_steps=1, per_device_train_batch_size=1),
            "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
            "beta": 0.0,
            "top_entropy_quantile": 1.0,
            "importance_sampling_level": "token",
            "epsilon_low": CLIP_LOW,
            "epsilon_high": CLIP_HIGH,
            "current_gradient_accumulation_steps": 1,
            "max_completion_length": MAX_COMPLETION_LENGTH,
            "_metrics": defaultdict(lambda: defaultdict(list)),
        }
        | settings
    )


def policy_loss(batch: Batch, settings: Golden, weights: Tensor | None = None, **options: Any) -> Golden:
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.zeros(batch.mask.shape, dtype=torch.long),
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logprobs,
        "ref_per_token_logps": batch.reference_logprobs,
        "num_items_in_batch": batch.mask.sum(),
        "importance_sampling_ratio": weights,
    }
    on = weights is not None
    stand_in = trainer(use_vllm=on, vllm_importance_sampling_correction=on, **options)

    def loss(logprobs: Tensor) -> Tensor:
        stand_in._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, batch.mask, None)
        return GRPOTrainer._compute_loss(stand_in, stand_in.model, inputs)

    clip = {"clip_ratio_low": CLIP_LOW, "clip_ratio_high": CLIP_HIGH}
    return {"peer": "trl", "loss_type": options["loss_type"], **clip, **settings} | differentiated(loss, batch.logprobs)


def policy_losses(batch: Batch) -> list[Golden]:
    modes = {
        "dapo": "token-mean",
        "bnpo": "token-mean",
        "grpo": "seq-mean-token-mean",
        "luspo": "seq-mean-token-sum",
        "dr_grpo": "seq-mean-token-sum-norm",
    }
    cases = []
    for loss_type, aggregation in modes.items():
        clip = {"policy_loss": "clip", "aggregation": aggregation}
        cases += [
            policy_loss(batch, clip, loss_type=loss_type),
            policy_loss(batch, clip | {"kl_coef": KL_COEF}, loss_type=loss_type, beta=KL_COEF),
            policy_loss(batch, clip | {"clip_ratio_c": 3.0}, loss_type=loss_type, delta=3.0),
        ]
    gspo = {"policy_loss": "gspo", "aggregation": "seq-mean-token-mean"}
    # TRL's epsilon_high is the cap itself here, and there is no lower clip.
    cispo = {"policy_loss": "cispo", "aggregation": "token-mean", "clip_ratio_low": 1.0}
    corrected = {"policy_loss": "clip", "aggregation": "token-mean", "importance_sampling": "sequence-mask"}
    weights = importance_ratio(batch, "sequence_mask", None, CAP)
    return [
        *cases,
        policy_loss(batch, gspo, loss_type="grpo", importance_sampling_level="sequence"),
        policy_loss(batch, cispo, loss_type="cispo", epsilon_high=1 + CLIP_HIGH),
        policy_loss(batch, corrected, weights, loss_type="dapo"),
    ]


def scored(generated: tuple[Any, ...], rewards: Tensor, logprobs: Tensor | None, **options: Any) -> Golden:
    """What GRPOTrainer makes of a generation: advantages, and the ratio of importance sampling."""
    stand_in = trainer(
        num_iterations=1,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        reward_weights=torch.ones(1),
        reward_func_names=["reward"],
        multi_objective_aggregation="sum_then_normalize",
        _generate=lambda _: generated,
        _calculate_rewards=lambda *_: rewards[:, None],
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, None, None),
        _logs={"rewards": defaultdict(list), "extra": {}} | {key: [] for key in ("prompt", "completion", "advantages")},
        _pending_metrics={},
        _pending_extra_logs={},
        **{"scale_rewards": "group", "num_generations": RESPONSES_PER_GROUP} | options,
    )
    return GRPOTrainer._generate_and_score_completions(stand_in, [{"prompt": ""} for _ in rewards])


def outcome_advantages(batch: Golden) -> list[Golden]:
    rewards, count = torch.tensor(batch["rewards"]), len(batch["rewards"])
    generated = ([[1]] * count, [[1]] * count, None, [""] * count, None, {}, None, None)
    cases = []
    for scale in ("group", "batch", "none"):
        options = {"scale_rewards": scale, "num_generations": batch["num_generations"]}
        advantages = scored(generated, rewards, None, **options)["advantages"]
        eps = None if scale == "none" else 1e-4
        cases.append({"peer": "trl", "estimator": f"grpo-{scale}", "eps": eps, "advantages": advantages.tolist()})
    return cases


def importance_ratio(batch: Batch, mode: str, low: float | None, high: float) -> Tensor:
    count, tokens = len(LENGTHS), [[1] * length for length in LENGTHS]
    generated = ([[1]] * count, tokens, None, [""] * count, listed(batch.sampler_logprobs), {}, None, None)
    output = scored(
        generated,
        batch.advantages,
        batch.old_logprobs,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    return output["importance_sampling_ratio"]


def importance_weights(batch: Batch) -> list[Golden]:
    cases = [
        ("token_truncate", None, CAP),
        ("sequence_mask", None, CAP),
        ("sequence_mask", 1 / CAP, CAP),
    ]
    return [
        {"peer": "trl", "mode": mode.replace("_", "-"), "min": low, "max": high}
        | {"weights": listed(importance_ratio(batch, mode, low, high))}
        for mode, low, high in cases
    ]


def overlong(lengths: list[int], buffer_length: int) -> list[float]:
    punish = get_soft_overlong_punishment(MAX_COMPLETION_LENGTH, buffer_length)
    return punish([[1] * length for length in lengths])
