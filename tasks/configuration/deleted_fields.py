"""Deleted fields: what a user does about each, and the constants that took the place of some.

A file with a deleted field is refused with a line that says what to do. A run that holds a deleted field goes on. The
digest of a run has the constants that decide what is learned: a run with the field's default stays the same run, and a
run with another value is refused.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from storage.errors import WrongInputError
from tasks.configuration.older_form import in_present_form

_SPEED = "remove it; a measured speed goes into"
_TOOLS = "remove it; the run's first iteration measures how long responses wait for tools"
_SHARED = "remove it; every pod but control's has shared memory"
_TEMPLATE = "make a PodTemplate with it in the cluster, and name the template in pod_template"
_FLOOR = "remove it; linear and cosine fall to 0"
_FAILED = "remove it; grading ends when a function fails for more than half of a micro-batch"
_LOADING = "remove it; importing code and loading weights may take 600 s"
_LOSSES = "remove it; a pool's trace_path says how machines are lost"
_LIMITS = "remove it; vLLM has 900 s to start, 600 s to load weights, 120 s for a step"
_LENGTH = "remove it; set model_max_length in the reward model's tokenizer_config.json"
_PASSES = "remove it; a pass has at most 16,384 tokens, and one input where padding changes a score"
_PLACE = "remove it; a reward model is on the trainer's device"
_QUEUE = "set the label kueue.x-k8s.io/queue-name"
_BETAS = "set betas, such as [0.9, 0.999]"
_BASE = "remove it; sums are modulo 10"
_FAILURE = "set on_failure to the number"
_IDS = "remove it; an id is extra_info.index where unique, else the row number"
# What to do, by path; * stands for the name of a pool, or a place in a list.
DELETED = {
    "algorithm.overlong_penalty_factor": "remove it; the penalty at the end of the buffer is 1",
    "critic.optimizer.beta1": _BETAS,
    "critic.optimizer.beta2": _BETAS,
    "critic.optimizer.min_learning_rate_ratio": _FLOOR,
    "data.arithmetic.base": _BASE,
    "data.id_column": _IDS,
    "data.size": "set data.limit",
    "evaluation.data.arithmetic.base": _BASE,
    "evaluation.data.id_column": _IDS,
    "evaluation.data.size": "set evaluation.data.limit",
    "evaluation.k": "remove it; k takes the powers of two up to num_generations, and that number",
    "evaluation.num_prompts": "set evaluation.data.limit",
    "evaluation.pass_threshold": "remove it; a reward of 1 is correct; evaluation.rewards may have other weights",
    "evaluation.rewards.*.batch_tokens_max": _PASSES,
    "evaluation.rewards.*.device": _PLACE,
    "evaluation.rewards.*.failed_share_max": _FAILED,
    "evaluation.rewards.*.failure_reward": _FAILURE,
    "evaluation.rewards.*.free_tokens": "set arguments.free_tokens",
    "evaluation.rewards.*.load_time_limit_s": _LOADING,
    "evaluation.rewards.*.max_length": _LENGTH,
    "evaluation.rewards.*.pattern": "set arguments.pattern",
    "evaluation.rewards.*.scale_tokens": "set arguments.scale_tokens",
    "evaluation.seed": "remove it; the seed of the sampling noise is 0",
    "forecast.accelerator_rollout": "set pools.rollout.accelerator",
    "forecast.accelerator_train": "set pools.train.accelerator",
    "forecast.bandwidth_efficiency": f"{_SPEED} forecast.step_s",
    "forecast.control_s": "remove it; 30 s are assumed until the run's first iteration measures them",
    "forecast.link_gbps": "remove it; 10 Gbit/s are assumed",
    "forecast.loss_process": _LOSSES,
    "forecast.iterations_simulated": "remove it; twelve iterations are simulated, and scaled",
    "forecast.lengths_column": "remove it; the column of lengths is called response_tokens",
    "forecast.loss_rate_factor": f"{_LOSSES}; the forecast shows 0.3 and 3 times the losses, too",
    "forecast.mfu": f"{_SPEED} forecast.train_s_per_token",
    "forecast.more_rollout": "set the trace_path of the pools in pools.more_rollout",
    "forecast.observation_tokens": _TOOLS,
    "forecast.process_s": "remove it; 60 s are assumed until the run's first iteration measures starts",
    "forecast.prompts_in_dataset": "remove it; a forecast expects that no prompt recurs",
    "forecast.response_sigma": "remove it; 0.8 is assumed; a lengths_path says otherwise",
    "forecast.runs_per_trainer": "remove it; gleaner fleet admit --dry-run says what other runs add",
    "forecast.seeds": "remove it; each setup is simulated five times",
    "forecast.tool_answers": _TOOLS,
    "forecast.tool_s": _TOOLS,
    "forecast.trace_path": "set pools.rollout.trace_path",
    "forecast.train_link_gbps": "remove it; 100 Gbit/s are assumed until the run's first iteration measures restoring",
    "optimizer.beta1": _BETAS,
    "optimizer.beta2": _BETAS,
    "optimizer.min_learning_rate_ratio": _FLOOR,
    "planning.recall_min": "remove it; a predictor with a recall below 0.3 is not used",
    "planning.seeding_after_s": "remove it; the trainer's machines generate after four times rollout.claim_ttl_s",
    "planning.seeding_s_initial": "remove it; the trainer's machines generate for 150 s the first time",
    "planning.seeding_s_min": "remove it; seeding takes at least 5 s, or none",
    "pools.control.affinity": _TEMPLATE,
    "pools.control.annotations": _TEMPLATE,
    "pools.control.mounts": _TEMPLATE,
    "pools.control.priority_class": _TEMPLATE,
    "pools.control.queue": _QUEUE,
    "pools.control.service_account": _TEMPLATE,
    "pools.control.shared_memory": _SHARED,
    "pools.control.volumes": _TEMPLATE,
    "pools.more_rollout.*.affinity": _TEMPLATE,
    "pools.more_rollout.*.annotations": _TEMPLATE,
    "pools.more_rollout.*.mounts": _TEMPLATE,
    "pools.more_rollout.*.priority_class": _TEMPLATE,
    "pools.more_rollout.*.queue": _QUEUE,
    "pools.more_rollout.*.service_account": _TEMPLATE,
    "pools.more_rollout.*.shared_memory": _SHARED,
    "pools.more_rollout.*.volumes": _TEMPLATE,
    "pools.rollout.affinity": _TEMPLATE,
    "pools.rollout.annotations": _TEMPLATE,
    "pools.rollout.mounts": _TEMPLATE,
    "pools.rollout.priority_class": _TEMPLATE,
    "pools.rollout.queue": _QUEUE,
    "pools.rollout.service_account": _TEMPLATE,
    "pools.rollout.shared_memory": _SHARED,
    "pools.rollout.volumes": _TEMPLATE,
    "pools.train.affinity": _TEMPLATE,
    "pools.train.annotations": _TEMPLATE,
    "pools.train.mounts": _TEMPLATE,
    "pools.train.priority_class": _TEMPLATE,
    "pools.train.queue": _QUEUE,
    "pools.train.service_account": _TEMPLATE,
    "pools.train.shared_memory": _SHARED,
    "pools.train.volumes": _TEMPLATE,
    "rewards.*.batch_tokens_max": _PASSES,
    "rewards.*.device": _PLACE,
    "rewards.*.failed_share_max": _FAILED,
    "rewards.*.failure_reward": _FAILURE,
    "rewards.*.free_tokens": "set arguments.free_tokens",
    "rewards.*.load_time_limit_s": _LOADING,
    "rewards.*.max_length": _LENGTH,
    "rewards.*.pattern": "set arguments.pattern",
    "rewards.*.scale_tokens": "set arguments.scale_tokens",
    "rollout.engine_restarts_max": "remove it; an engine is restarted twice in an iteration",
    "rollout.heartbeat_interval_s": "remove it; it is rollout.flush_interval_s, at most a third of claim_ttl_s",
    "rollout.vllm.block_size": "remove it; vLLM chooses",
    "rollout.vllm.load_timeout_s": _LIMITS,
    "rollout.vllm.max_num_batched_tokens": "remove it; vLLM chooses",
    "rollout.vllm.start_timeout_s": _LIMITS,
    "rollout.vllm.step_timeout_s": _LIMITS,
    "rollout.weight_cache_dir": "remove it; the weight cache lies below TMPDIR (env of a pool)",
    "tracking.directory": "remove it; files of trackers lie in the folder tracking, below that of the process",
    "trainer.phase_start_share": "remove it; training begins when 0.9 of the groups are recorded",
    "trainer.poll_interval_s": "remove it; it is a fifth of rollout.flush_interval_s",
    "trainer.weights_full_interval": "remove it; every tenth version is stored whole",
    "turns.attempts_max": "remove it; a response has three attempts",
    "turns.calls_per_process": "remove it; a process makes 32 calls side by side; set turns.processes",
    "turns.invalid_calls_max": "remove it; three invalid calls in a row end a response",
    "turns.load_time_limit_s": _LOADING,
}

# The constants that decide what is learned, by path: the value of the deleted field in the digest of every run.
CONSTANTS: dict[str, object] = {
    "algorithm.overlong_penalty_factor": 1.0,
    "critic.optimizer.min_learning_rate_ratio": 0.0,
    "data.arithmetic.base": 10,
    "data.id_column": None,
    "optimizer.min_learning_rate_ratio": 0.0,
    "rewards.*.max_length": None,
    "turns.attempts_max": 3,
    "turns.invalid_calls_max": 3,
}
# Sections that a run may leave out: without the section there is no constant.
_OPTIONAL_SECTIONS = frozenset({"turns", "lora", "evaluation"})


class ConstantDiffersError(WrongInputError):
    """A run holds a deleted field that decides what is learned, with another value than the constant in its place."""


def advice(location: tuple[Any, ...]) -> str | None:
    """What to do about the field at a location of a document; None for a field that was never deleted."""
    path = _path(location)
    return None if path is None else DELETED[path]


def without_deleted(document: Mapping[str, Any], *, to_read: bool = False) -> dict[str, Any]:
    """The document of a run without deleted fields; what has an older form is in the present form.

    Args:
        document: The run's configuration, or settings, as JSON values.
        to_read: The run is shown and does not go on, so the values of deleted fields do not matter.

    Raises:
        ConstantDiffersError: A deleted field decides what is learned, and differs from the constant.
    """
    kept: dict[str, Any] = _kept(in_present_form(document), (), to_read)
    planning = kept.get("planning")
    if not to_read and isinstance(planning, dict) and planning.get("length_predictor") == "features":
        planning["length_predictor"] = "auto"  # a deleted value, not a deleted field
    return kept


def with_constants(settings: dict[str, Any], constants: Mapping[str, object] = CONSTANTS) -> dict[str, Any]:
    """Settings whose digest names a run or an evaluation, with the constants in place of deleted fields.

    Args:
        settings: Nested JSON values; changed in place, and returned.
        constants: The values by path; the default is for the settings that decide what a run learns.
    """
    for path, value in constants.items():
        _set(settings, path.split("."), value)
    return settings


def _set(inside: Any, path: Sequence[str], value: object) -> None:
    name, *rest = path
    if not rest:
        inside[name] = value
    elif name == "*":
        for item in inside:
            _set(item, rest, value)
    elif inside[name] is not None or name not in _OPTIONAL_SECTIONS:
        _set(inside[name], rest, value)


def _kept(value: Any, location: tuple[Any, ...], to_read: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _kept(held, (*location, name), to_read)
            for name, held in value.items()
            if not _is_deleted((*location, name), held, to_read)
        }
    if isinstance(value, list | tuple):
        return [_kept(item, (*location, index), to_read) for index, item in enumerate(value)]
    return value


def _is_deleted(location: tuple[Any, ...], held: object, to_read: bool) -> bool:
    """Whether the field is deleted; raises ConstantDiffersError for a run that goes on with a different value."""
    path = _path(location)
    if path in CONSTANTS and held != CONSTANTS[path] and not to_read:
        shown = ".".join(map(str, location))
        raise ConstantDiffersError(
            f"{shown}: value {json.dumps(held)} held; allowed: {json.dumps(CONSTANTS[path])}, because the field is "
            "deleted; go on with the version that began the run"
        )
    return path is not None


def _path(location: tuple[Any, ...]) -> str | None:
    """The deleted field at a location of a document, by its path in DELETED."""
    paths = _BY_NAME.get(location[-1], ()) if location else ()
    return next((path for path in paths if _matches(path.split("."), location)), None)


def _by_name() -> dict[str, list[str]]:
    """The paths of the deleted fields by their last part: a document has thousands of locations."""
    found: dict[str, list[str]] = {}
    for path in DELETED:
        found.setdefault(path.rpartition(".")[2], []).append(path)
    return found


_BY_NAME = _by_name()


def _matches(path: list[str], location: tuple[Any, ...]) -> bool:
    return len(path) == len(location) and all(a in ("*", b) for a, b in zip(path, location, strict=True))
