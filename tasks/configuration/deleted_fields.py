"""Deleted fields: what a user does about each, and the constants that took the place of some.

A file with a deleted field is refused with a line that says what to do. A run that holds a deleted field goes on. The
digest of a run has the constants that decide what is learned: a run with the field's default stays the same run, and a
run with another value is refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from storage.errors import WrongInputError

_SPEED = "remove it; a measured speed goes into"
_TOOLS = "remove it; the run's first iteration measures how long responses wait for tools"
_SHARED = "remove it; a pod has shared memory unless mounts has /dev/shm"
_FLOOR = "remove it; linear and cosine fall to 0"
_FAILED = "remove it; grading ends when a function fails for more than half of a micro-batch"
_LOADING = "remove it; importing code and loading weights may take 600 s"
_LOSSES = "remove it; forecast.loss_rate_factor and trace_path say how machines are lost"
_LIMITS = "remove it; vLLM has 900 s to start, 600 s to load weights, 120 s for a step"
# What to do, by path; * stands for the name of a pool, or a place in a list.
DELETED = {
    "algorithm.overlong_penalty_factor": "remove it; the penalty at the end of the buffer is 1",
    "critic.optimizer.min_learning_rate_ratio": _FLOOR,
    "evaluation.rewards.*.failed_share_max": _FAILED,
    "evaluation.rewards.*.load_time_limit_s": _LOADING,
    "forecast.accelerator_rollout": "set pools.rollout.accelerator",
    "forecast.accelerator_train": "set pools.train.accelerator",
    "forecast.bandwidth_efficiency": f"{_SPEED} forecast.step_s",
    "forecast.control_s": "remove it; 30 s are assumed until the run's first iteration measures them",
    "forecast.loss_process": _LOSSES,
    "forecast.mfu": f"{_SPEED} forecast.train_s_per_token",
    "forecast.more_rollout.*.accelerator": "set the accelerator of the pool in pools.more_rollout",
    "forecast.more_rollout.*.loss_process": _LOSSES,
    "forecast.more_rollout.*.loss_rate_factor": "remove it; forecast.loss_rate_factor is for all pools",
    "forecast.more_rollout.*.start_s": "remove it; forecast.start_s is for all pools",
    "forecast.more_rollout.*.step_s": "remove it; the run's first iteration measures step times",
    "forecast.observation_tokens": _TOOLS,
    "forecast.process_s": "remove it; 60 s are assumed until the run's first iteration measures starts",
    "forecast.prompts_in_dataset": "remove it; a forecast expects that no prompt recurs",
    "forecast.runs_per_trainer": "remove it; gleaner fleet admit --dry-run says what other runs add",
    "forecast.tool_answers": _TOOLS,
    "forecast.tool_s": _TOOLS,
    "forecast.train_link_gbps": "remove it; 100 Gbit/s are assumed until the run's first iteration measures restoring",
    "optimizer.min_learning_rate_ratio": _FLOOR,
    "planning.recall_min": "remove it; a predictor with a recall below 0.3 is not used",
    "pools.control.shared_memory": _SHARED,
    "pools.more_rollout.*.shared_memory": _SHARED,
    "pools.rollout.shared_memory": _SHARED,
    "pools.train.shared_memory": _SHARED,
    "rewards.*.failed_share_max": _FAILED,
    "rewards.*.load_time_limit_s": _LOADING,
    "rollout.engine_restarts_max": "remove it; an engine is restarted twice in an iteration",
    "rollout.vllm.block_size": "remove it; vLLM chooses",
    "rollout.vllm.load_timeout_s": _LIMITS,
    "rollout.vllm.max_num_batched_tokens": "remove it; vLLM chooses",
    "rollout.vllm.start_timeout_s": _LIMITS,
    "rollout.vllm.step_timeout_s": _LIMITS,
    "rollout.weight_cache_dir": "remove it; the weight cache lies below TMPDIR (env of a pool)",
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
    "optimizer.min_learning_rate_ratio": 0.0,
    "turns.attempts_max": 3,
    "turns.invalid_calls_max": 3,
}
# Sections that a run may leave out: without the section there is no constant.
_OPTIONAL_SECTIONS = frozenset({"turns", "lora", "evaluation"})


class ConstantDiffersError(WrongInputError):
    """A run holds a deleted field that decides what is learned, with another value than the constant in its place."""


def advice(location: tuple[Any, ...]) -> str | None:
    """What to do about the field at a location of a document; None for a field that was never deleted."""
    return next((told for path, told in DELETED.items() if _matches(path.split("."), location)), None)


def without_deleted(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a run without deleted fields.

    Raises:
        ConstantDiffersError: A deleted field decides what is learned, and differs from the constant.
    """
    kept: dict[str, Any] = _kept(document, ())
    return kept


def with_constants(identity: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide what is learned, with the constants in place of deleted fields.

    identity: Nested JSON values; changed in place, and returned.
    """
    for path, value in CONSTANTS.items():
        *sections, name = path.split(".")
        inside: Any = identity
        for section in sections:
            inside = inside[section]
            if inside is None and section in _OPTIONAL_SECTIONS:
                break
        else:
            inside[name] = value
    return identity


def _kept(value: Any, location: tuple[Any, ...]) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _kept(held, (*location, name))
            for name, held in value.items()
            if not _is_deleted((*location, name), held)
        }
    if isinstance(value, list | tuple):
        return [_kept(item, (*location, index)) for index, item in enumerate(value)]
    return value


def _is_deleted(location: tuple[Any, ...], held: object) -> bool:
    """Whether the field is deleted; raises ConstantDiffersError for another value than the constant."""
    path = ".".join(map(str, location))
    if path in CONSTANTS and held != CONSTANTS[path]:
        raise ConstantDiffersError(
            f"{path}: value {json.dumps(held)} held; allowed: {json.dumps(CONSTANTS[path])}, because the field is "
            "deleted; go on with the version that began the run"
        )
    return advice(location) is not None


def _matches(path: list[str], location: tuple[Any, ...]) -> bool:
    return len(path) == len(location) and all(a in ("*", b) for a, b in zip(path, location, strict=True))
