"""The meaning of verl's overrides in a run, with the defaults that differ from Gleaner's.

Names with an equal meaning need no line here: `tasks.configuration.other_names` has a table.
"""

import math
import re

from tasks.adopting.adoption import Adoption
from tasks.adopting.verl_defaults import DEFAULTS, machinery_of
from tasks.configuration import user_function
from tasks.configuration.estimators import ESTIMATORS
from tasks.configuration.other_names import VERL

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "model"))
_COUNT = "`--count` says how many iterations are trained"
REASONS = {
    **dict.fromkeys(("trainer.total_epochs", "trainer.total_training_steps"), _COUNT),
    "trainer.resume_mode": "every iteration is recorded and can be continued",
    "trainer.save_freq": "every iteration is recorded and can be continued; see trainer.checkpoint_interval",
    f"{ROLLOUT}mode": "each member generates by itself",
    "actor_rollout_ref.actor.strategy": "the trainer divides a model among its processes by FSDP2",
    "actor_rollout_ref.hybrid_engine": "generating and training have machines of their own; see `pools`",
    "data.filter_overlong_prompts": "a longer prompt is refused, and you leave it out",
    "data.return_raw_chat": "messages go through the policy's chat template",
    f"{MODEL}use_remove_padding": "there is no padding to remove; see trainer.micro_batch_tokens_max",
    "trainer.val_before_train": "weight version 0 is evaluated with the others",
    "data.truncation": "a longer prompt is refused, never cut",
    "algorithm.filter_groups.metric": "name one of `rewards` in algorithm.filter_groups_reward, or take their sum",
}
_OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
_KL = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
_LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
_SAMPLED = ("n", "temperature", "top_p", "top_k", "do_sample")
_TRACKERS = ("tensorboard", "wandb", "mlflow")
_CRITIC = next(name for name, estimator in ESTIMATORS.items() if estimator.needs_critic)


def carry_over(adoption: Adoption) -> None:
    """Decide about all overrides of a script."""
    for name, reason in REASONS.items():
        adoption.leave(name, reason)
    _machinery(adoption)
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
    _turns(adoption)
    _machines(adoption)
    adoption.settle(VERL)


def _machinery(adoption: Adoption) -> None:
    """Omit the sections about verl's computing with one message each: a file may hold hundreds of such settings."""
    sections: dict[str, list[str]] = {}
    for name in adoption.given:
        section = machinery_of(name)
        if section is not None and name not in DEFAULTS:
            sections.setdefault(section, []).append(name)
    for section, names in sections.items():
        adoption.leave_section(section, names, f"{len(names)} settings of how verl computes and stores")


def _machines(adoption: Adoption) -> None:
    """GPUs of a machine become processes of the trainer and of an engine, and the GPUs of the pools."""
    gpus, engine = "trainer.n_gpus_per_node", f"{ROLLOUT}tensor_model_parallel_size"
    for field in ("trainer.nproc_per_node", "pools.train.gpus"):
        adoption.carry(field, adoption.value(gpus, 8), gpus)
    adoption.carry("trainer.nnodes", adoption.value("trainer.nnodes", 1), "trainer.nnodes")
    for field in ("rollout.vllm.tensor_parallel_size", "pools.rollout.gpus"):
        adoption.carry(field, adoption.value(engine, 2), engine)
    adoption.doubt("the machines", "name those with so many GPUs in pools.train.machine and pools.rollout.machine")


def _turns(adoption: Adoption) -> None:
    """Tools are functions and classes of verl's own kinds; a configuration of Gleaner names tools differently."""
    part = f"{ROLLOUT}multi_turn."
    if adoption.value(f"{part}enable") is True or not adoption.is_known(f"{part}enable"):
        adoption.leave_open(
            "turns.tools", "the functions that the policy calls; see verl's tools in docs/guide/turns.md"
        )
        most = f"{part}max_assistant_turns"
        adoption.carry("turns.turns_max", adoption.value(most) or 10_000, most)
        adoption.ignore(f"{part}enable")
    loop = f"{ROLLOUT}agent.default_agent_loop"
    if adoption.value(loop, "single_turn_agent") not in ("single_turn_agent", "tool_agent"):
        adoption.leave_open("turns.agent", f"a program that asks the policy, in place of {adoption.value(loop)}")


def _data(adoption: Adoption) -> None:
    adoption.carry(
        "sampling.max_completion_length", adoption.value("data.max_response_length", 512), "data.max_response_length"
    )
    _files(adoption, "data.train_files", "data.source")
    interval, held_out = adoption.count("trainer.test_freq", -1), "data.val_files"
    if interval > 0 or not adoption.is_known("trainer.test_freq"):
        _files(adoption, held_out, "evaluation.data.source")
    if {"evaluation.data.source"} & {*adoption.fields, *adoption.open}:
        kept = f"{ROLLOUT}val_kwargs."
        adoption.carry("evaluation.interval", interval, "trainer.test_freq")
        adoption.carry("evaluation.data.shuffle", value=False)
        for field, name in (("prompt_column", "data.prompt_key"), ("max_prompt_length", "data.max_prompt_length")):
            if adoption.has(name):
                adoption.carry(f"evaluation.data.{field}", adoption.value(name), name)
                adoption.carry(f"data.{field}", adoption.value(name), name)
        length = adoption.value("data.max_response_length", 512)
        adoption.carry("evaluation.sampling.max_completion_length", length, "data.max_response_length")
        adoption.carry("evaluation.sampling.temperature", adoption.value(f"{kept}temperature", 0), f"{kept}temperature")
        adoption.carry("evaluation.num_generations", adoption.value(f"{kept}n", 1), f"{kept}n")
        for part, neutral in (("top_p", 1), ("top_k", -1)):
            if adoption.value(f"{kept}{part}", neutral) != neutral or not adoption.is_known(f"{kept}{part}"):
                adoption.carry(f"evaluation.sampling.{part}", adoption.value(f"{kept}{part}"), f"{kept}{part}")
        adoption.ignore(f"{kept}do_sample")
    for name in (held_out, "trainer.test_freq", *(f"{ROLLOUT}val_kwargs.{part}" for part in _SAMPLED)):
        adoption.leave(name, "an evaluation needs data.val_files and trainer.test_freq from 1")
    limit = "data.max_prompt_length"
    adoption.carry("data.max_prompt_length", adoption.value(limit, 512), limit)
    if adoption.count("data.train_max_samples", -1) < 0:
        adoption.ignore("data.train_max_samples")


def _files(adoption: Adoption, name: str, field: str) -> None:
    given = adoption.value(name)
    files = given if isinstance(given, list) else [given]
    if not adoption.is_known(name) or (len(files) == 1 and isinstance(files[0], str)):
        adoption.carry(field, files[0], name)
    adoption.refuse(name, f"{len(files)} files; allowed: one, so join them", field)


def _batch(adoption: Adoption) -> None:
    prompts, part = adoption.count("data.train_batch_size", 1024), adoption.count(f"{ACTOR}ppo_mini_batch_size", 256)
    adoption.carry("run.num_generations", adoption.value(f"{ROLLOUT}n", 1), f"{ROLLOUT}n")
    adoption.carry("run.num_prompts_per_step", prompts, "data.train_batch_size")
    names, field = (f"{ACTOR}ppo_mini_batch_size", "data.train_batch_size"), "algorithm.num_mini_batches"
    if not adoption.is_known(*names) or (part > 0 and prompts % part == 0):
        adoption.carry(field, prompts // max(1, part), *names)
        return
    reason = f"{prompts} prompts are no whole mini-batches of {part}"
    adoption.refuse(names[0], reason, field)
    adoption.leave_open(field, reason)


def _loss(adoption: Adoption) -> None:
    estimator = adoption.value("algorithm.adv_estimator", _CRITIC)
    adoption.carry("algorithm.advantage_estimator", estimator, "algorithm.adv_estimator")
    adoption.carry("algorithm.gae_lambda", adoption.value("algorithm.lam", 1.0), "algorithm.lam")
    if estimator == _CRITIC:
        adoption.carry("algorithm.value_clip", adoption.value("critic.cliprange_value", 0.5), "critic.cliprange_value")
        decay = "critic.optim.weight_decay"
        adoption.carry("critic.optimizer.weight_decay", adoption.value(decay, 0.01), decay)
    else:
        for name in [name for name in adoption.given if name.startswith("critic.")]:
            adoption.leave(name, f"there is no critic with {estimator}")
    scale, name = adoption.value("algorithm.norm_adv_by_std_in_grpo"), "algorithm.norm_adv_by_std_in_grpo"
    if isinstance(scale, bool):
        adoption.carry("algorithm.scale_rewards", "group" if scale else "none", name)
    loss = adoption.word(f"{ACTOR}policy_loss.loss_mode", "vanilla")
    if loss in _LOSSES:
        adoption.carry("algorithm.policy_loss", _LOSSES[loss], f"{ACTOR}policy_loss.loss_mode")
    reason = f"Gleaner has no such loss; allowed: {', '.join(_LOSSES)}"
    adoption.refuse(f"{ACTOR}policy_loss.loss_mode", reason, "algorithm.policy_loss")
    if loss == "gspo":
        # verl's loss of this name takes the mean over responses, whatever is written.
        adoption.leave(f"{ACTOR}loss_agg_mode", "gspo is a mean over responses")
        adoption.carry("algorithm.loss_agg_mode", "seq-mean-token-mean", f"{ACTOR}policy_loss.loss_mode")
    both = adoption.number(f"{ACTOR}clip_ratio", 0.2)
    for side in ("low", "high"):
        name = f"{ACTOR}clip_ratio_{side}"
        value = adoption.number(name, both)
        is_own = adoption.has(name) or not adoption.is_known(name)
        adoption.carry(f"algorithm.clip_ratio_{side}", value, name if is_own else f"{ACTOR}clip_ratio")
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
            adoption.refuse(kind, reason, "algorithm.kl_estimator")
        elif not adoption.is_known(switch):
            adoption.carry("algorithm.kl_coef", 0, switch)
            reason = f"{switch} is not known"
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
    """No importance weights by default; settings of several releases of verl turn weights on."""
    field, part, cap = "algorithm.importance_sampling", "algorithm.rollout_correction.", f"{ACTOR}tis_imp_ratio_cap"
    kind, threshold, bypass = f"{part}rollout_is", f"{part}rollout_is_threshold", f"{part}bypass_mode"
    given = adoption.value(kind)
    if adoption.number(cap, -1) > 0:
        adoption.carry(field, "token", cap)
        adoption.carry("algorithm.importance_sampling_cap", adoption.value(cap), cap)
    elif given in (None, "token") or not adoption.is_known(kind):
        adoption.carry(field, given or "none", kind, cap)
        if given is not None:
            adoption.carry("algorithm.importance_sampling_cap", adoption.value(threshold, 2.0), threshold)
    adoption.refuse(kind, "allowed: token, null", field)
    if given is None:
        adoption.leave(threshold, f"{kind} is null, so it has no effect")
    if adoption.value(bypass) is True or not adoption.is_known(bypass):
        adoption.carry("algorithm.old_logprobs", "sampler", bypass)


def _optimizer(adoption: Adoption) -> None:
    """The schedule is counted in iterations there, and in optimizer steps here."""
    rate = f"{ACTOR}optim."
    adoption.carry("optimizer.weight_decay", adoption.value(f"{rate}weight_decay", 0.01), f"{rate}weight_decay")
    betas, name = adoption.value(f"{rate}betas", [0.9, 0.999]), f"{rate}betas"
    if adoption.has(name) and isinstance(betas, list) and len(betas) == 2:
        adoption.carry("optimizer.betas", betas, name)
    elif adoption.has(name) or not adoption.is_known(name):
        adoption.leave_open("optimizer.betas", f"{name}, {betas}")
    parts = adoption.fields.get("algorithm.num_mini_batches")
    each = (1 if parts is None else parts.value) * max(1, adoption.count(f"{ACTOR}ppo_epochs", 1))
    total = adoption.count(f"{rate}total_training_steps", -1)
    total = total if total > 0 else adoption.count("trainer.total_training_steps", -1)
    _warmup(adoption, rate, total, each)
    _schedule(adoption, rate, total, each)


def _warmup(adoption: Adoption, rate: str, total: int, each: int) -> None:
    field, counted, shared = "optimizer.warmup_steps", f"{rate}lr_warmup_steps", f"{rate}lr_warmup_steps_ratio"
    warmup, share = adoption.count(counted, -1), adoption.number(shared, 0)
    if warmup >= 0 or not adoption.is_known(counted):
        adoption.carry(field, warmup * each, counted)
        adoption.leave(shared, "lr_warmup_steps is given")
    elif (share > 0 and total > 0) or not adoption.is_known(shared):
        adoption.carry(field, math.ceil(share * total) * each, shared)
    elif share == 0:
        adoption.ignore(shared)
    adoption.ignore(counted)
    adoption.refuse(shared, "the number of steps, total_training_steps, is not given", field)


def _schedule(adoption: Adoption, rate: str, total: int, each: int) -> None:
    steps, counted = "optimizer.total_steps", (f"{rate}total_training_steps", "trainer.total_training_steps")
    for name in (f"{rate}lr_scheduler_type", f"{rate}warmup_style"):
        kind = adoption.word(name, "constant")
        if kind == "cosine" or not adoption.is_known(name):
            adoption.carry("optimizer.schedule", kind, name)
            if total > 0 or not adoption.is_known(*counted):
                adoption.carry(steps, total * each, *counted)
            else:
                known = "the number of optimizer steps; verl takes it from total_epochs and the number of rows"
                adoption.leave_open(steps, known)
        elif kind == "constant":
            adoption.ignore(name)
        adoption.refuse(name, "allowed: constant, cosine", "optimizer.schedule")
    for name in counted:
        adoption.leave(name, _COUNT)


def _rollout(adoption: Adoption) -> None:
    engine = f"{ROLLOUT}name"
    if adoption.value(engine, "vllm") == "vllm" or not adoption.is_known(engine):
        adoption.carry("rollout.engine", "vllm", engine)
    adoption.refuse(engine, "Gleaner's engines are vllm and torch", "rollout.engine")
    sampled = adoption.value(f"{ROLLOUT}do_sample", True)
    if sampled is not True:
        adoption.leave_open("sampling.temperature", f"{ROLLOUT}do_sample is {sampled}")
    adoption.carry("rollout.dtype", adoption.value(f"{ROLLOUT}dtype", "bfloat16"), f"{ROLLOUT}dtype")
    adoption.carry("trainer.dtype", "bfloat16")
    if adoption.value(f"{ROLLOUT}top_k") == -1:
        adoption.carry("sampling.top_k", 0, f"{ROLLOUT}top_k")


def _model(adoption: Adoption) -> None:
    name, rank = f"{MODEL}enable_gradient_checkpointing", adoption.count(f"{MODEL}lora_rank", 0)
    adoption.carry("trainer.gradient_checkpointing", adoption.value(name, True), name)
    if rank == 0 and adoption.is_known(f"{MODEL}lora_rank"):
        for part in ("lora_rank", "lora_alpha", "target_modules"):
            adoption.leave(f"{MODEL}{part}", "lora_rank is 0, so there are no adapters")
        return
    adoption.carry("lora.rank", rank, f"{MODEL}lora_rank")
    adoption.carry("lora.alpha", adoption.value(f"{MODEL}lora_alpha", 16), f"{MODEL}lora_alpha")
    layers = f"{MODEL}target_modules"
    if adoption.value(layers, "all-linear") in ("all-linear", ["all-linear"]):
        adoption.carry("lora.target_modules", [], layers)
    elif isinstance(adoption.value(layers), str):
        adoption.refuse(
            layers, "it is a regular expression; allowed: names of layers, all-linear", "lora.target_modules"
        )


def _reward(adoption: Adoption) -> None:
    """A function in a file below the current directory is a module; a file elsewhere has to be moved there."""
    for section in ("custom_reward_function", "reward.custom_reward_function"):
        own = (f"{section}.path", f"{section}.name")
        path, function = (adoption.value(name, plain) for name, plain in zip(own, ("", "compute_score"), strict=True))
        module = re.sub(r"^\./", "", str(path or "")).removesuffix(".py").replace("/", ".")
        spec = f"{module}:{function or 'compute_score'}"
        if not adoption.is_known(*own) or (str(path).endswith(".py") and user_function.PATTERN.fullmatch(spec)):
            adoption.carry("rewards", [{"function": spec}], *own)
        reason = "allowed: a .py file below the current directory, which is named as module:function"
        if not path:
            adoption.ignore(*own)
        adoption.refuse(own[0], reason, "rewards")
        adoption.leave(own[1], reason)
    for section, name in (("reward_model", "model.path"), ("reward.reward_model", "model_path")):
        if adoption.value(f"{section}.enable") is True:
            adoption.leave_open("rewards", f"{section} at {adoption.value(f'{section}.{name}')}: see `reward_model`")
            adoption.ignore(f"{section}.enable", f"{section}.{name}")
    for buffer in ("reward_model.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg", _OVERLONG):
        if adoption.value(f"{buffer}.enable") is True:
            adoption.carry("algorithm.overlong_buffer_length", adoption.value(f"{buffer}.len"), f"{buffer}.len")
            factor = f"{buffer}.penalty_factor"
            if adoption.value(factor, 1.0) != 1.0:
                adoption.leave_open("algorithm.overlong_buffer_length", f"{factor} is not 1, as Gleaner's is")
                adoption.leave(factor, "the penalty at the end of Gleaner's buffer is 1")
            adoption.ignore(factor)
            adoption.ignore(f"{buffer}.enable", f"{buffer}.log")


def _trackers(adoption: Adoption) -> None:
    given = adoption.value("trainer.logger")
    named = given if isinstance(given, list) else [given]
    if known := [name for name in named if name in _TRACKERS]:
        adoption.carry("tracking.backends", known, "trainer.logger")
    if unknown := [name for name in named if name not in (*_TRACKERS, "console", None)]:
        adoption.note("trainer.logger", f"{', '.join(map(str, unknown))}; allowed: {', '.join(_TRACKERS)}")
    adoption.ignore("trainer.logger")
