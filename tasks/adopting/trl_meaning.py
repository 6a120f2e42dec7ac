"""What the settings of TRL's GRPOConfig mean here, and its defaults where they differ from ours.

Names that mean the same need no line: they are in the table of `tasks.configuration.other_names`.
"""

import math

from tasks.adopting.adoption import Adoption
from tasks.configuration.other_names import TRL

_COUNT = "`--count` says how many iterations are trained"
_ALWAYS = "every iteration is recorded and can be continued"
_EVALUATION = "an evaluation has prompts of its own; see the section `evaluation`"
REASONS = {
    **dict.fromkeys(("num_train_epochs",), _COUNT),
    **dict.fromkeys(("logging_steps", "logging_strategy"), _ALWAYS),
    **dict.fromkeys(("save_steps", "save_strategy", "save_total_limit"), f"{_ALWAYS}; see trainer.checkpoint_interval"),
    **dict.fromkeys(("eval_steps", "eval_strategy", "per_device_eval_batch_size", "num_generations_eval"), _EVALUATION),
    "remove_unused_columns": "every column goes to the reward functions",
    "reward_weights": "each of `rewards` has its `weight`",
    "vllm_mode": "the engine is part of each rollout process",
    "use_cpu": "`trainer.device` and `rollout.device` take the GPU if there is one",
}
# TRL's loss types by how they make one number of token losses.
_AGGREGATIONS = dict(  # noqa: C408 - a text would look like the name of an estimator
    grpo="seq-mean-token-mean",
    dapo="token-mean",
    bnpo="token-mean",
    dr_grpo="seq-mean-token-sum-norm",
    cispo="token-mean",
)
_BATCH = ("generation_batch_size", "per_device_train_batch_size", "steps_per_generation", "gradient_accumulation_steps")
_WEIGHTS = {"token_truncate": "token", "sequence_mask": "sequence-mask"}
_TRACKERS = ("tensorboard", "wandb", "mlflow")


def carry_over(adoption: Adoption) -> None:
    """Decide about all settings of a script."""
    for name, reason in REASONS.items():
        adoption.leave(name, reason)
    _batch(adoption)
    _loss(adoption)
    _clipping(adoption)
    _weights(adoption)
    _schedule(adoption)
    _sampling(adoption)
    _machine(adoption)
    _trackers(adoption)
    adoption.settle(TRL)


def _batch(adoption: Adoption) -> None:
    """Prompts of an iteration, and into how many optimizer steps they are divided, as one process trains them."""
    if adoption.is_open(*_BATCH, "num_generations"):
        adoption.note("run.num_prompts_per_step", "the batch size is no literal, so this has Gleaner's default")
        for name in _BATCH:
            adoption.leave(name, "it is one factor of a batch size that is no literal")
        return
    rows, accumulated = (adoption.count(name, plain) for name, plain in ((_BATCH[1], 8), (_BATCH[3], 1)))
    steps = adoption.count("steps_per_generation", accumulated)
    responses, group = adoption.count("generation_batch_size", rows * steps), adoption.count("num_generations", 8)
    prompts, rest = divmod(responses, max(1, group))
    parts, parts_rest = divmod(responses, max(1, rows * accumulated))
    if min(rows, accumulated, responses, group) < 1 or rest or parts_rest:
        adoption.note(
            "run.num_prompts_per_step", f"{responses} responses are no whole groups of {group} in whole steps"
        )
        for name in _BATCH:
            adoption.leave(name, "see run.num_prompts_per_step")
        return
    adoption.carry("run.num_prompts_per_step", prompts, *_BATCH, "num_generations")
    adoption.carry("algorithm.num_mini_batches", parts, *_BATCH)
    adoption.carry("run.num_generations", group, "num_generations")
    if not adoption.has("generation_batch_size"):
        reason = f"no script says it; run.num_prompts_per_step is for 1, so write {prompts} times yours"
        adoption.note("the number of processes", reason)


def _loss(adoption: Adoption) -> None:
    adoption.carry("algorithm.advantage_eps", 1e-4)
    scale = adoption.value("scale_rewards", True)
    adoption.carry(
        "algorithm.scale_rewards", {"True": "group", "False": "none"}.get(str(scale), scale), "scale_rewards"
    )
    kind, level = adoption.word("loss_type", "dapo"), adoption.word("importance_sampling_level", "token")
    aggregation = _AGGREGATIONS.get(kind)
    if aggregation is None:
        adoption.leave("loss_type", f"Gleaner has no such loss; allowed: {', '.join(_AGGREGATIONS)}")
        adoption.leave("importance_sampling_level", "it belongs to a loss that Gleaner has not")
        return
    adoption.carry("algorithm.loss_agg_mode", aggregation, "loss_type")
    if level == "sequence" and aggregation == "seq-mean-token-mean":
        adoption.carry("algorithm.policy_loss", "gspo", "importance_sampling_level")
    elif level == "token":
        adoption.carry(
            "algorithm.policy_loss", "cispo" if kind == "cispo" else "clip", "loss_type", "importance_sampling_level"
        )
    else:
        adoption.leave(
            "importance_sampling_level", "Gleaner has ratios of whole responses with a mean over responses only"
        )


def _clipping(adoption: Adoption) -> None:
    low = adoption.number("epsilon", 0.2)
    high = adoption.number("epsilon_high", low)
    if adoption.value("loss_type") == "cispo":
        # TRL's bound is the ratio itself, and there is none below.
        adoption.carry("algorithm.clip_ratio_low", 1.0)
        adoption.leave("epsilon", "the loss cispo has no lower bound")
        adoption.carry("algorithm.clip_ratio_high", round(high - 1, 9), "epsilon_high")
        return
    adoption.carry("algorithm.clip_ratio_low", low, "epsilon")
    adoption.carry(
        "algorithm.clip_ratio_high", high, *(("epsilon_high",) if adoption.has("epsilon_high") else ("epsilon",))
    )


def _weights(adoption: Adoption) -> None:
    """Importance weights. Without a word about them, ours are chosen by how the run samples."""
    corrects, mode = "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"
    chosen = adoption.word(mode, "sequence_mask")
    if adoption.value(corrects) is False:
        adoption.carry("algorithm.importance_sampling", "none", corrects)
        adoption.leave(mode, f"{corrects} is False")
        adoption.leave("vllm_importance_sampling_cap", f"{corrects} is False")
    elif adoption.has(corrects) or adoption.has(mode):
        if chosen in _WEIGHTS:
            adoption.carry("algorithm.importance_sampling", _WEIGHTS[chosen], corrects, mode)
        adoption.leave(mode, f"Gleaner has no such weights; allowed: {', '.join(_WEIGHTS)}")


def _schedule(adoption: Adoption) -> None:
    kind, steps = adoption.word("lr_scheduler_type", "linear"), adoption.count("max_steps", -1)
    is_known = steps > 0
    if kind in ("constant", "constant_with_warmup"):
        adoption.carry("optimizer.schedule", "constant", "lr_scheduler_type")
        adoption.leave("max_steps", _COUNT)
    elif kind in ("linear", "cosine") and is_known:
        adoption.carry("optimizer.schedule", kind, "lr_scheduler_type")
        adoption.carry("optimizer.total_steps", steps, "max_steps")
    else:
        reason = "`linear` and `cosine` need the number of optimizer steps, optimizer.total_steps; it is constant here"
        if adoption.has("lr_scheduler_type"):
            adoption.leave(
                "lr_scheduler_type", reason if kind in ("linear", "cosine") else "Gleaner has no such schedule"
            )
        else:
            adoption.note("lr_scheduler_type (TRL's default, linear)", reason)
        adoption.leave("max_steps", _COUNT)
    for name in ("warmup_ratio", "warmup_steps"):
        share = adoption.number(name, 0)
        if not isinstance(share, float) and name == "warmup_steps":
            continue
        if share and is_known:
            adoption.carry("optimizer.warmup_steps", math.ceil(share * steps), name)
        elif share:
            adoption.leave(name, "without max_steps it is a share of an unknown number of steps")
        else:
            adoption.carry("optimizer.warmup_steps", 0, name)
    if adoption.value("optim") in ("adamw_torch", "adamw_torch_fused"):
        adoption.ignore("optim")
    adoption.leave("optim", "the optimizer is AdamW")


def _sampling(adoption: Adoption) -> None:
    adoption.carry(
        "sampling.max_completion_length", adoption.value("max_completion_length", 256), "max_completion_length"
    )
    if adoption.has("top_k"):
        given = adoption.value("top_k")
        adoption.carry("sampling.top_k", 0 if given in (None, -1) else given, "top_k")
    for name, neutral in (("min_p", None), ("repetition_penalty", 1)):
        if adoption.value(name) == neutral:
            adoption.ignore(name)


def _machine(adoption: Adoption) -> None:
    if adoption.has("seed"):
        adoption.carry("run.seed", adoption.value("seed"), "seed")
        adoption.carry("data.seed", adoption.value("seed"), "seed")
    adoption.carry(
        "trainer.gradient_checkpointing", adoption.value("gradient_checkpointing", True), "gradient_checkpointing"
    )
    is_half = adoption.value("bf16")
    is_half = not adoption.value("fp16", False) if is_half is None else is_half
    for field in ("trainer.dtype", "rollout.dtype"):
        adoption.carry(field, "bfloat16" if is_half else "float32", "bf16")
    if adoption.value("fp16") in (None, False):
        adoption.ignore("fp16")
    adoption.leave("fp16", "`trainer.dtype` is float32 or bfloat16")
    if adoption.has("use_vllm"):
        adoption.carry("rollout.engine", "vllm" if adoption.value("use_vllm") else "torch", "use_vllm")


def _trackers(adoption: Adoption) -> None:
    given = adoption.value("report_to")
    if given is None:
        return
    named = given if isinstance(given, list) else [given]
    known = [name for name in named if name in _TRACKERS]
    if known or named in ([], ["none"]):
        adoption.carry("tracking.backends", known, "report_to")
    if unknown := [name for name in named if name not in (*_TRACKERS, "none")]:
        adoption.note("report_to", f"{', '.join(map(str, unknown))}; allowed: {', '.join(_TRACKERS)}")
    adoption.leave("report_to", f"allowed: {', '.join(_TRACKERS)}")
