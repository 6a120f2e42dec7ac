"""The meaning of TRL's GRPOConfig in a run, with the defaults that differ from Gleaner's.

Names with an equal meaning need no line here: `tasks.configuration.other_names` has a table.
"""

import math
import re
from typing import Any

from tasks.adopting import trl_adapters, trl_inputs
from tasks.adopting.adoption import Adoption
from tasks.adopting.trl_defaults import GRPO, TRAINING
from tasks.configuration.other_names import TRL

_COUNT = "`--count` says how many iterations are trained"
_ALWAYS = "every iteration is recorded and can be continued"
_PARALLEL = "the trainer divides a model among its processes by FSDP2; see trainer.nproc_per_node"
_ENGINE = "the engine is part of each rollout process"
REASONS = {
    **dict.fromkeys(("num_train_epochs",), _COUNT),
    **dict.fromkeys(("logging_steps", "logging_strategy", "resume_from_checkpoint"), _ALWAYS),
    **dict.fromkeys(("save_steps", "save_strategy", "save_total_limit"), f"{_ALWAYS}; see trainer.checkpoint_interval"),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerate_config"), _PARALLEL),
    **dict.fromkeys(("vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_server_base_url"), _ENGINE),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "`gleaner export` writes a directory that can be uploaded"),
    "env": "variables of a pod's environment are in pools.train.env and the other pools'",
    "remove_unused_columns": "every column goes to the reward functions",
    "use_cpu": "`trainer.device` and `rollout.device` take the GPU if there is one",
    "callbacks": "Gleaner has no callbacks; what they change is not known",
    "reward_processing_classes": "a reward model reads its own tokenizer",
    "processing_class": "the tokenizer and its chat template are those at policy.path; save yours there",
    "quantization_config": "the policy is trained as it is stored, in float32 or bfloat16",
    "load_in_4bit": "the policy is trained as it is stored, in float32 or bfloat16",
    "load_in_8bit": "the policy is trained as it is stored, in float32 or bfloat16",
    "LoraConfig": "TRL's trainer does not get it, so the whole model is trained",
    "multi_objective_aggregation": "rewards are summed with their weights, then normalised",
    "disable_dropout": "the policy is trained without dropout",
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
_SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
# With other kernels, or with moments of fewer bits.
_ADAMW = re.compile(r"(?:paged_)?adamw(?:_\w+)?")
_OVERRIDING = ("temperature", "top_p", "top_k")


def carry_over(adoption: Adoption) -> None:
    """Decide about all settings of a script."""
    adoption.hide(GRPO | TRAINING)
    trl_inputs.carry_over(adoption)
    for name, reason in REASONS.items():
        adoption.leave(name, reason)
    _batch(adoption)
    _loss(adoption)
    _clipping(adoption)
    _weights(adoption)
    _kl(adoption)
    schedule(adoption)
    warmup(adoption)
    _length(adoption)
    sampling(adoption)
    machine(adoption)
    trackers(adoption)
    trl_adapters.carry_over(adoption)
    trl_inputs.evaluation(adoption)
    adoption.settle(TRL)


def _batch(adoption: Adoption) -> None:
    """Prompts of an iteration, and into how many optimizer steps they are divided."""
    rows, accumulated = (adoption.count(name, plain) for name, plain in ((_BATCH[1], 8), (_BATCH[3], 1)))
    processes = adoption.count("num_processes", 1)
    steps = adoption.count("steps_per_generation", accumulated)
    group = adoption.count("num_generations", 8)
    responses = adoption.count("generation_batch_size", rows * steps * processes)
    prompts, rest = divmod(responses, max(1, group))
    parts, parts_rest = divmod(responses, max(1, rows * accumulated * processes))
    adoption.carry("run.num_generations", group, "num_generations")
    if min(rows, accumulated, responses, group, processes) < 1 or rest or parts_rest:
        reason = f"{responses} responses of {processes} process(es) are no whole groups of {group} in whole steps"
        if adoption.is_known(*_BATCH, "num_generations"):
            adoption.note("run.num_prompts_per_step", reason)
        for field in ("run.num_prompts_per_step", "algorithm.num_mini_batches"):
            adoption.leave_open(field, reason)
        for name in _BATCH:
            adoption.leave(name, "see run.num_prompts_per_step")
    adoption.carry("run.num_prompts_per_step", prompts, *_BATCH, "num_generations", "num_processes")
    adoption.carry("algorithm.num_mini_batches", parts, *_BATCH)
    is_found = "run.num_prompts_per_step" in adoption.fields
    if adoption.has("num_processes"):
        adoption.carry("trainer.nproc_per_node", processes, "num_processes")
        adoption.carry("pools.train.gpus", processes, "num_processes")
    elif is_found and not adoption.has("generation_batch_size"):
        reason = f"no script says it; run.num_prompts_per_step is for 1, so write {prompts} times yours"
        adoption.doubt("the number of processes", reason)


def _loss(adoption: Adoption) -> None:
    adoption.carry("algorithm.advantage_eps", 1e-4)
    scale = adoption.value("scale_rewards", True)
    adoption.carry(
        "algorithm.scale_rewards", {"True": "group", "False": "none"}.get(str(scale), scale), "scale_rewards"
    )
    kind, level = adoption.word("loss_type", "dapo"), adoption.word("importance_sampling_level", "token")
    aggregation = _AGGREGATIONS.get(kind)
    if aggregation is None:
        reason = f"Gleaner has no such loss; allowed: {', '.join(_AGGREGATIONS)}"
        adoption.refuse("loss_type", reason, "algorithm.policy_loss", "algorithm.loss_agg_mode")
        adoption.leave("importance_sampling_level", "it belongs to a loss that Gleaner has not")
        return
    adoption.carry("algorithm.loss_agg_mode", aggregation, "loss_type")
    if level == "sequence" and aggregation == "seq-mean-token-mean":
        adoption.carry("algorithm.policy_loss", "gspo", "importance_sampling_level", "loss_type")
    elif level == "token":
        adoption.carry(
            "algorithm.policy_loss", "cispo" if kind == "cispo" else "clip", "loss_type", "importance_sampling_level"
        )
    else:
        reason = "Gleaner has ratios of whole responses with a mean over responses only"
        adoption.refuse("importance_sampling_level", reason, "algorithm.policy_loss", "algorithm.loss_agg_mode")


def _clipping(adoption: Adoption) -> None:
    low = adoption.number("epsilon", 0.2)
    has_high = adoption.value("epsilon_high") is not None or not adoption.is_known("epsilon_high")
    high = adoption.number("epsilon_high", low) if has_high else low
    source = "epsilon_high" if has_high else "epsilon"
    if adoption.value("loss_type") == "cispo":
        # TRL's bound is the ratio itself, and there is none below.
        adoption.carry("algorithm.clip_ratio_low", 1.0)
        adoption.leave("epsilon", "the loss cispo has no lower bound")
        adoption.carry("algorithm.clip_ratio_high", round(high - 1, 9), "epsilon_high")
        return
    adoption.carry("algorithm.clip_ratio_low", low, "epsilon")
    adoption.carry("algorithm.clip_ratio_high", high, source)


def _weights(adoption: Adoption) -> None:
    """Importance weights: TRL has them with vLLM only. Without it, ours are chosen by how the run samples."""
    corrects, mode = "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"
    caps = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    chosen = adoption.word(mode, "sequence_mask")
    if adoption.value(corrects) is False:
        adoption.carry("algorithm.importance_sampling", "none", corrects)
        for name in (mode, *caps):
            adoption.leave(name, f"{corrects} is False")
    elif adoption.has(corrects) or not adoption.is_known(corrects, mode) or adoption.has(mode) or _uses_vllm(adoption):
        if chosen in _WEIGHTS:
            adoption.carry("algorithm.importance_sampling", _WEIGHTS[chosen], corrects, mode)
        reason = f"Gleaner has no such weights; allowed: {', '.join(_WEIGHTS)}"
        adoption.refuse(mode, reason, "algorithm.importance_sampling")
        cap = next((name for name in caps if adoption.has(name) or not adoption.is_known(name)), caps[0])
        if adoption.value(cap, 3.0) is None:
            adoption.refuse(cap, "Gleaner's weights have a cap", "algorithm.importance_sampling_cap")
            adoption.leave_open("algorithm.importance_sampling_cap", f"{cap}: null; Gleaner's weights have a cap")
        else:
            adoption.carry("algorithm.importance_sampling_cap", adoption.value(cap, 3.0), cap)


def _uses_vllm(adoption: Adoption) -> bool:
    return adoption.value("use_vllm") is True


def _kl(adoption: Adoption) -> None:
    """TRL multiplies the KL by the ratio of the loss where use_bias_correction_kl is true, which it is by default."""
    if adoption.value("beta", 0.0) in (0, 0.0) and adoption.is_known("beta"):
        adoption.ignore("use_bias_correction_kl", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
        return
    reason = "Gleaner does not multiply the KL by the ratio of the loss"
    if adoption.has("use_bias_correction_kl"):
        if adoption.value("use_bias_correction_kl") is False:
            adoption.ignore("use_bias_correction_kl")
        adoption.leave("use_bias_correction_kl", reason)
    else:
        adoption.note("use_bias_correction_kl (true by default since TRL 1.16)", reason)


def schedule(adoption: Adoption) -> None:
    """The learning rate's course over the optimizer steps."""
    given = adoption.word("lr_scheduler_type", "linear")
    kind = _SCHEDULES.get(given, given)
    if kind not in ("constant", "linear", "cosine"):
        adoption.refuse("lr_scheduler_type", "Gleaner has no such schedule", "optimizer.schedule")
        adoption.leave("max_steps", _COUNT)
        return
    adoption.carry("optimizer.schedule", kind, "lr_scheduler_type")
    extra = adoption.value("lr_scheduler_kwargs")
    if given == "cosine_with_min_lr" or extra:
        adoption.leave_open("optimizer.schedule", f"{given} with {extra}; Gleaner's linear and cosine fall to 0")
        adoption.leave("lr_scheduler_kwargs", "see optimizer.schedule")
    if kind == "constant" and adoption.is_known("lr_scheduler_type"):
        adoption.leave("max_steps", _COUNT)
    elif _steps(adoption) > 0 or not adoption.is_known("max_steps"):
        adoption.carry("optimizer.total_steps", _steps(adoption), "max_steps")
    else:
        epochs = adoption.value("num_train_epochs", 3)
        known = f"the number of optimizer steps; TRL takes it from num_train_epochs ({epochs}) and the number of rows"
        adoption.leave_open("optimizer.total_steps", known)


def _steps(adoption: Adoption) -> int:
    return adoption.count("max_steps", -1)


def warmup(adoption: Adoption) -> None:
    """Steps, or a share of all steps. The schedule `constant` of transformers has none, whatever is given."""
    given = [name for name in ("warmup_ratio", "warmup_steps") if adoption.has(name) or not adoption.is_known(name)]
    for name in given:
        share = adoption.number(name, 0)
        if adoption.value("lr_scheduler_type") == "constant":
            adoption.leave(name, "transformers' schedule constant has no warm-up; see constant_with_warmup")
        elif name == "warmup_steps" and (isinstance(share, int) or share >= 1):
            adoption.carry("optimizer.warmup_steps", int(share), name)
        elif not share and len(given) > 1:
            adoption.ignore(name)
        elif _steps(adoption) > 0 or not share:
            adoption.carry("optimizer.warmup_steps", math.ceil(share * _steps(adoption)) if share else 0, name)
        else:
            reason = "without max_steps it is a share of an unknown number of steps"
            adoption.refuse(name, reason, "optimizer.warmup_steps")
    _optimizer(adoption)


def _optimizer(adoption: Adoption) -> None:
    """AdamW, in whichever of its forms; the learning rate of another optimizer says nothing here."""
    kind = adoption.word("optim", "adamw_torch")
    if kind in ("adamw_torch", "adamw_torch_fused"):
        adoption.ignore("optim")
    elif _ADAMW.fullmatch(kind):
        adoption.leave("optim", "the moments of AdamW are in float32")
    if not adoption.is_known("optim"):
        adoption.carry("optimizer.learning_rate", None, "optim")
    rate = f"learning_rate {adoption.value('learning_rate', 1e-6)} is for another"
    for name, reason in (
        ("optim", f"the optimizer is AdamW, and {rate}"),
        ("optimizers", f"the optimizer is AdamW with a schedule of `optimizer`, and {rate}"),
    ):
        adoption.refuse(name, reason, "optimizer.learning_rate")


def _length(adoption: Adoption) -> None:
    length = "max_completion_length"
    adoption.carry("sampling.max_completion_length", adoption.value(length, 512), length)
    if not adoption.has(length) and adoption.is_known(length):
        adoption.doubt(length, "512 is the default of TRL 1.16; it was 256 until TRL 1.8")


def sampling(adoption: Adoption) -> None:
    """How tokens are drawn."""
    if adoption.has("top_k"):
        given = adoption.value("top_k")
        adoption.carry("sampling.top_k", 0 if given in (None, -1) else given, "top_k")
    for name, neutral in (("min_p", 0), ("repetition_penalty", 1)):
        if adoption.value(name) == neutral:
            adoption.ignore(name)
    extra = adoption.value("generation_kwargs", {})
    hidden = extra if isinstance(extra, dict) else dict.fromkeys(_OVERRIDING)
    if not adoption.is_known("generation_kwargs"):
        hidden = dict.fromkeys(_OVERRIDING)
    for name in _OVERRIDING:
        if name in hidden:
            adoption.leave_open(f"sampling.{name}", f"generation_kwargs may hold {name}: {hidden[name]}")
    if extra:
        adoption.leave("generation_kwargs", "Gleaner samples by temperature, top_p and top_k alone")


def machine(adoption: Adoption) -> None:
    """Seeds, dtypes, and what depends on the machines."""
    seed = adoption.value("seed", 42)
    adoption.carry("run.seed", seed, "seed")
    adoption.carry("data.seed", seed, "seed")
    adoption.carry(
        "trainer.gradient_checkpointing",
        adoption.flag("gradient_checkpointing", default=True),
        "gradient_checkpointing",
    )
    is_half = not adoption.value("fp16")
    if adoption.value("bf16") is not None:
        is_half = adoption.flag("bf16", default=True)
    for field in ("trainer.dtype", "rollout.dtype"):
        adoption.carry(field, "bfloat16" if is_half else "float32", "bf16")
    if adoption.value("fp16") in (None, False):
        adoption.ignore("fp16")
    adoption.leave("fp16", "`trainer.dtype` is float32 or bfloat16")
    if adoption.has("use_vllm") or not adoption.is_known("use_vllm"):
        adoption.carry("rollout.engine", "vllm" if adoption.value("use_vllm") else "torch", "use_vllm")
    gpus = adoption.count("vllm_tensor_parallel_size", 1)
    if gpus != 1 or not adoption.is_known("vllm_tensor_parallel_size"):
        adoption.carry("rollout.vllm.tensor_parallel_size", gpus, "vllm_tensor_parallel_size")
        adoption.carry("pools.rollout.gpus", gpus, "vllm_tensor_parallel_size")


def trackers(adoption: Adoption) -> None:
    """Where metrics are logged to."""
    given: Any = adoption.value("report_to")
    if given is None:
        return
    named = given if isinstance(given, list) else [given]
    known = [name for name in named if name in _TRACKERS]
    if known or named in ([], ["none"]):
        adoption.carry("tracking.backends", known, "report_to")
    if unknown := [name for name in named if name not in (*_TRACKERS, "none")]:
        adoption.note("report_to", f"{', '.join(map(str, unknown))}; allowed: {', '.join(_TRACKERS)}")
    adoption.leave("report_to", f"allowed: {', '.join(_TRACKERS)}")
