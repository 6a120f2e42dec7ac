"""What verl's overrides mean here, and its defaults where they differ from ours.

Names that mean the same need no line: they are in the table of `tasks.configuration.other_names`.
"""

import math
import re

from tasks.adopting.adoption import Adoption
from tasks.configuration import user_function
from tasks.configuration.estimators import ESTIMATORS
from tasks.configuration.other_names import VERL

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "model"))
_COUNT = "`--count` says how many iterations are trained"
_MACHINES = "machines are described in `pools`"
REASONS = {
    **dict.fromkeys(("trainer.total_epochs", "trainer.total_training_steps"), _COUNT),
    "trainer.resume_mode": "every iteration is recorded and can be continued",
    "trainer.save_freq": "every iteration is recorded and can be continued; see trainer.checkpoint_interval",
    **dict.fromkeys(("trainer.n_gpus_per_node", "trainer.nnodes"), _MACHINES),
    "trainer.val_before_train": "weight version 0 is evaluated with the others",
    "data.truncation": "a longer prompt is refused, never cut",
    "algorithm.filter_groups.metric": "name one of `rewards` in algorithm.filter_groups_reward, or take their sum",
}
_KL = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
_LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
_TRACKERS = ("tensorboard", "wandb", "mlflow")
_CRITIC = next(name for name, estimator in ESTIMATORS.items() if estimator.needs_critic)


def carry_over(adoption: Adoption) -> None:
    """Decide about all overrides of a script."""
    for name, reason in REASONS.items():
        adoption.leave(name, reason)
    _data(adoption)
    _batch(adoption)
    _loss(adoption)
    _kl(adoption)
    _filtering(adoption)
    _weights(adoption)
    _optimizer(adoption)
    _rollout(adoption)
    _model(adoption)
    _reward(adoption)
    _trackers(adoption)
    adoption.settle(VERL)


def _data(adoption: Adoption) -> None:
    adoption.carry(
        "sampling.max_completion_length", adoption.value("data.max_response_length", 512), "data.max_response_length"
    )
    _files(adoption, "data.train_files", "data.source")
    interval = adoption.count("trainer.test_freq", -1)
    if interval > 0 and adoption.has("data.val_files"):
        _files(adoption, "data.val_files", "evaluation.data.source")
    if "evaluation.data.source" in adoption.fields:
        kept = f"{ROLLOUT}val_kwargs."
        adoption.carry("evaluation.interval", interval, "trainer.test_freq")
        adoption.carry("evaluation.data.shuffle", value=False)
        for field, name in (("prompt_column", "data.prompt_key"), ("max_prompt_length", "data.max_prompt_length")):
            if adoption.has(name):
                adoption.carry(f"evaluation.data.{field}", adoption.value(name), name)
                adoption.carry(f"data.{field}", adoption.value(name), name)
        length = adoption.fields["sampling.max_completion_length"].value
        adoption.carry("evaluation.sampling.max_completion_length", length, "data.max_response_length")
        adoption.carry("evaluation.sampling.temperature", adoption.value(f"{kept}temperature", 0), f"{kept}temperature")
        adoption.carry("evaluation.num_generations", adoption.value(f"{kept}n", 1), f"{kept}n")
    for name in ("data.val_files", "trainer.test_freq", f"{ROLLOUT}val_kwargs.n", f"{ROLLOUT}val_kwargs.temperature"):
        adoption.leave(name, "an evaluation needs one file data.val_files and trainer.test_freq from 1")
    if adoption.count("data.train_max_samples", -1) < 0:
        adoption.ignore("data.train_max_samples")


def _files(adoption: Adoption, name: str, field: str) -> None:
    given = adoption.value(name)
    files = given if isinstance(given, list) else [given]
    if len(files) == 1 and isinstance(files[0], str):
        adoption.carry(field, files[0], name)
    adoption.leave(name, f"{len(files)} files; allowed: one, so join them")


def _batch(adoption: Adoption) -> None:
    prompts, part = adoption.count("data.train_batch_size", 1024), adoption.count(f"{ACTOR}ppo_mini_batch_size", 256)
    adoption.carry("run.num_generations", adoption.value(f"{ROLLOUT}n", 1), f"{ROLLOUT}n")
    if adoption.is_open("data.train_batch_size", f"{ACTOR}ppo_mini_batch_size"):
        adoption.leave(f"{ACTOR}ppo_mini_batch_size", "the number of prompts is no literal")
        if not adoption.is_open("data.train_batch_size"):
            adoption.carry("run.num_prompts_per_step", prompts, "data.train_batch_size")
        return
    adoption.carry("run.num_prompts_per_step", prompts, "data.train_batch_size")
    if part > 0 and prompts % part == 0:
        adoption.carry(
            "algorithm.num_mini_batches", prompts // part, f"{ACTOR}ppo_mini_batch_size", "data.train_batch_size"
        )
    adoption.leave(f"{ACTOR}ppo_mini_batch_size", f"{prompts} prompts are no whole mini-batches of {part}")


def _loss(adoption: Adoption) -> None:
    estimator = adoption.value("algorithm.adv_estimator", _CRITIC)
    adoption.carry("algorithm.advantage_estimator", estimator, "algorithm.adv_estimator")
    adoption.carry("algorithm.gae_lambda", adoption.value("algorithm.lam", 1.0), "algorithm.lam")
    if estimator == _CRITIC:
        adoption.carry("algorithm.value_clip", adoption.value("critic.cliprange_value", 0.5), "critic.cliprange_value")
        adoption.carry("critic.optimizer.weight_decay", 0.01)
    scale, name = adoption.value("algorithm.norm_adv_by_std_in_grpo"), "algorithm.norm_adv_by_std_in_grpo"
    if isinstance(scale, bool):
        adoption.carry("algorithm.scale_rewards", "group" if scale else "none", name)
    loss = adoption.word(f"{ACTOR}policy_loss.loss_mode", "vanilla")
    if loss in _LOSSES:
        adoption.carry("algorithm.policy_loss", _LOSSES[loss], f"{ACTOR}policy_loss.loss_mode")
    adoption.leave(f"{ACTOR}policy_loss.loss_mode", f"Gleaner has no such loss; allowed: {', '.join(_LOSSES)}")
    if loss == "gspo":
        # verl's loss of this name takes the mean over responses, whatever is written.
        adoption.leave(f"{ACTOR}loss_agg_mode", "gspo is a mean over responses")
        adoption.carry("algorithm.loss_agg_mode", "seq-mean-token-mean", f"{ACTOR}policy_loss.loss_mode")
    both = adoption.number(f"{ACTOR}clip_ratio", 0.2)
    for side in ("low", "high"):
        name = f"{ACTOR}clip_ratio_{side}"
        value = adoption.number(name, both)
        adoption.carry(f"algorithm.clip_ratio_{side}", value, name if adoption.has(name) else f"{ACTOR}clip_ratio")
    adoption.leave(f"{ACTOR}clip_ratio", "clip_ratio_low and clip_ratio_high are given")
    adoption.carry("algorithm.clip_ratio_c", adoption.value(f"{ACTOR}clip_ratio_c", 3.0), f"{ACTOR}clip_ratio_c")
    if adoption.value(f"{ACTOR}entropy_coeff") == 0:
        adoption.ignore(f"{ACTOR}entropy_coeff")
    adoption.leave(f"{ACTOR}entropy_coeff", "Gleaner has no bonus for entropy")


def _kl(adoption: Adoption) -> None:
    """There is a KL in the reward and one in the loss, each with a switch."""
    used = None
    for switch, coefficient, kind, plain, place in (
        ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "kl", "reward"),
        (f"{ACTOR}use_kl_loss", f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type", "low_var_kl", "loss"),
    ):
        names, reason = (switch, coefficient, kind), f"{switch} is not true, so it has no effect"
        if adoption.value(switch) is True and used is None:
            used = place
            estimator = adoption.word(kind, plain)
            adoption.carry("algorithm.kl_in", place, switch)
            adoption.carry("algorithm.kl_coef", adoption.value(coefficient, 0.001), coefficient)
            if estimator in _KL:
                adoption.carry("algorithm.kl_estimator", _KL[estimator], kind)
            reason = f"allowed: {', '.join(_KL)}"
        elif adoption.value(switch) is True:
            reason = f"Gleaner has one KL, and it is in the {used} already"
        else:
            adoption.ignore(switch)
        for name in names:
            adoption.leave(name, reason)


def _filtering(adoption: Adoption) -> None:
    group = "algorithm.filter_groups."
    most, prompts = adoption.count(f"{group}max_num_gen_batches", 0), adoption.count("data.train_batch_size", 1024)
    generated = adoption.count("data.gen_batch_size", prompts)
    if adoption.value(f"{group}enable") is True:
        adoption.carry("algorithm.filter_groups", True, f"{group}enable")
        if most > 0 and prompts > 0:
            names = (f"{group}max_num_gen_batches", "data.gen_batch_size")
            adoption.carry("algorithm.filter_groups_budget", most * generated / prompts, *names)
    else:
        adoption.ignore(f"{group}enable")
    adoption.leave(f"{group}max_num_gen_batches", "allowed: from 1, with filter_groups.enable")
    adoption.leave("data.gen_batch_size", "an iteration of dynamic sampling samples what it needs")


def _weights(adoption: Adoption) -> None:
    kind = "algorithm.rollout_correction.rollout_is"
    if adoption.has(kind):
        given = adoption.value(kind)
        if given in (None, "token"):
            adoption.carry("algorithm.importance_sampling", given or "none", kind)
        adoption.leave(kind, "allowed: token, null")
    cap = f"{ACTOR}tis_imp_ratio_cap"
    if adoption.number(cap, -1) > 0:
        adoption.carry("algorithm.importance_sampling", "token", cap)
        adoption.carry("algorithm.importance_sampling_cap", adoption.value(cap), cap)
    else:
        adoption.ignore(cap)


def _optimizer(adoption: Adoption) -> None:
    """The schedule is counted in iterations there, and in optimizer steps here."""
    rate = f"{ACTOR}optim."
    adoption.carry("optimizer.weight_decay", adoption.value(f"{rate}weight_decay", 0.01), f"{rate}weight_decay")
    parts = adoption.fields.get("algorithm.num_mini_batches")
    each = (1 if parts is None else parts.value) * max(1, adoption.count(f"{ACTOR}ppo_epochs", 1))
    total, warmup = adoption.count(f"{rate}total_training_steps", -1), adoption.count(f"{rate}lr_warmup_steps", -1)
    total = total if total > 0 else adoption.count("trainer.total_training_steps", -1)
    share = adoption.number(f"{rate}lr_warmup_steps_ratio", 0)
    if warmup >= 0:
        adoption.carry("optimizer.warmup_steps", warmup * each, f"{rate}lr_warmup_steps")
    elif share > 0 and total > 0:
        adoption.carry("optimizer.warmup_steps", math.ceil(share * total) * each, f"{rate}lr_warmup_steps_ratio")
    adoption.ignore(f"{rate}lr_warmup_steps")
    if share == 0:
        adoption.ignore(f"{rate}lr_warmup_steps_ratio")
    adoption.leave(f"{rate}lr_warmup_steps_ratio", "lr_warmup_steps is given, or the number of steps is not")
    for name in (f"{rate}lr_scheduler_type", f"{rate}warmup_style"):
        kind = adoption.word(name, "constant")
        if kind == "cosine" and total > 0:
            adoption.carry("optimizer.schedule", kind, name)
            adoption.carry(
                "optimizer.total_steps", total * each, f"{rate}total_training_steps", "trainer.total_training_steps"
            )
        elif kind == "constant":
            adoption.ignore(name)
        adoption.leave(name, "allowed: constant, or cosine with the number of steps, total_training_steps")
    adoption.leave(f"{rate}total_training_steps", _COUNT)


def _rollout(adoption: Adoption) -> None:
    engine = f"{ROLLOUT}name"
    if adoption.value(engine) == "vllm":
        adoption.carry("rollout.engine", "vllm", engine)
    adoption.leave(engine, "Gleaner's engines are vllm and torch")
    adoption.carry("rollout.dtype", adoption.value(f"{ROLLOUT}dtype", "bfloat16"), f"{ROLLOUT}dtype")
    adoption.carry("trainer.dtype", "bfloat16")
    if adoption.value(f"{ROLLOUT}top_k") == -1:
        adoption.carry("sampling.top_k", 0, f"{ROLLOUT}top_k")


def _model(adoption: Adoption) -> None:
    name, rank = f"{MODEL}enable_gradient_checkpointing", adoption.count(f"{MODEL}lora_rank", 0)
    adoption.carry("trainer.gradient_checkpointing", adoption.value(name, True), name)
    if rank == 0:
        for part in ("lora_rank", "lora_alpha", "target_modules"):
            adoption.ignore(f"{MODEL}{part}")
        return
    adoption.carry("lora.rank", rank, f"{MODEL}lora_rank")
    adoption.carry("lora.alpha", adoption.value(f"{MODEL}lora_alpha", 16), f"{MODEL}lora_alpha")
    if adoption.value(f"{MODEL}target_modules") == "all-linear":
        adoption.ignore(f"{MODEL}target_modules")


def _reward(adoption: Adoption) -> None:
    """A function in a file below the current directory is a module; any other one has to be moved there."""
    own = ("custom_reward_function.path", "custom_reward_function.name")
    path, function = (adoption.word(name, plain) for name, plain in zip(own, ("", "compute_score"), strict=True))
    module = re.sub(r"^\./", "", path).removesuffix(".py").replace("/", ".")
    if path.endswith(".py") and user_function.PATTERN.fullmatch(f"{module}:{function}"):
        adoption.carry("rewards", [{"function": f"{module}:{function}"}], *own)
    for name in own:
        adoption.leave(name, "allowed: a .py file below the current directory, which is named as module:function")


def _trackers(adoption: Adoption) -> None:
    given = adoption.value("trainer.logger")
    named = given if isinstance(given, list) else [given]
    if known := [name for name in named if name in _TRACKERS]:
        adoption.carry("tracking.backends", known, "trainer.logger")
    if unknown := [name for name in named if name not in (*_TRACKERS, "console", None)]:
        adoption.note("trainer.logger", f"{', '.join(map(str, unknown))}; allowed: {', '.join(_TRACKERS)}")
    adoption.ignore("trainer.logger")
