"""Fields that an earlier version has and this one does not.

A file that sets such a field is refused with a line that says what to do. A run that holds one goes on: none of them
decides what is learned, and none is in the digest of a run.
"""

from collections.abc import Mapping
from typing import Any

_SPEED = "remove it; a measured speed goes into"
_TOOLS = "remove it; the run's first iteration measures how long responses wait for tools"
_LOSSES = "remove it; forecast.loss_rate_factor and trace_path say how machines are lost"
# What to do, by path; * stands for the name of a pool.
DELETED = {
    "forecast.accelerator_rollout": "set pools.rollout.accelerator",
    "forecast.accelerator_train": "set pools.train.accelerator",
    "forecast.bandwidth_efficiency": f"{_SPEED} forecast.step_s",
    "forecast.control_s": "remove it; 30 s are assumed until the run's first iteration measures them",
    "forecast.loss_process": _LOSSES,
    "forecast.mfu": f"{_SPEED} forecast.train_s_per_token",
    "forecast.more_rollout.*.accelerator": "set the accelerator of the pool in pools.more_rollout",
    "forecast.more_rollout.*.loss_process": _LOSSES,
    "forecast.more_rollout.*.step_s": "remove it; the run's first iteration measures step times",
    "forecast.observation_tokens": _TOOLS,
    "forecast.prompts_in_dataset": "remove it; a forecast expects that no prompt recurs",
    "forecast.runs_per_trainer": "remove it; gleaner fleet admit --dry-run says what other runs add",
    "forecast.tool_answers": _TOOLS,
    "forecast.tool_s": _TOOLS,
    "forecast.train_link_gbps": "remove it; 100 Gbit/s are assumed until the run's first iteration measures restoring",
}


def advice(location: tuple[Any, ...]) -> str | None:
    """What to do about the field at a location of a document; None if no earlier version has it."""
    return next((told for path, told in DELETED.items() if _matches(path.split("."), location)), None)


def without_deleted(document: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The document that a run holds without deleted fields."""
    kept: dict[str, Any] = {}
    for name, value in document.items():
        location = (*above, name)
        if advice(location) is None:
            kept[name] = without_deleted(value, location) if isinstance(value, Mapping) else value
    return kept


def _matches(path: list[str], location: tuple[Any, ...]) -> bool:
    return len(path) == len(location) and all(a in ("*", b) for a, b in zip(path, location, strict=True))
