"""What older runs hold in other fields, and the form in which those settings enter the digest of a run.

An older reward has the settings of a built-in function as fields of its own, and the value of a failure beside the name
"use_failure_reward". Older data has a number of generated prompts beside the limit on rows, and an older optimizer two
fields for its decays. The digest of a run has the older form, so an older run stays the same run.
"""

from collections.abc import Mapping
from typing import Any

# The arguments of built-in reward functions.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {"format": ("pattern",), "length": ("free_tokens", "scale_tokens")}
# The generator of prompts, and the number of its prompts without a limit.
ARITHMETIC, SIZE = "arithmetic", 4096
# The decays of an optimizer without fields for them.
BETAS = (0.9, 0.999)
_USE, _STOP = "use_failure_reward", "stop"


def in_present_form(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document that a run holds, in the present form; other values stay as they are."""
    found = dict(document)
    if isinstance(found.get("rewards"), list):
        found["rewards"] = [_reward(each) if isinstance(each, Mapping) else each for each in found["rewards"]]
    if isinstance(found.get("data"), Mapping):
        found["data"] = _data(found["data"])
    if isinstance(found.get("optimizer"), Mapping):
        found["optimizer"] = _optimizer(found["optimizer"])
    for section in ("critic", "evaluation"):
        if isinstance(found.get(section), Mapping):
            found[section] = in_present_form(found[section])
    return found


def _reward(held: Mapping[str, Any]) -> dict[str, Any]:
    names = ARGUMENTS.get(str(held.get("function")), ())
    given = {name: held[name] for name in names if held.get(name) is not None}
    counts = {"on_failure": held.get("failure_reward", 0.0)} if held.get("on_failure") == _USE else {}
    return {**held, **({"arguments": given} if given else {}), **counts}


def _data(held: Mapping[str, Any]) -> dict[str, Any]:
    size, limit = held.get("size"), held.get("limit")
    if held.get("source", ARITHMETIC) != ARITHMETIC or size is None or (size == SIZE and limit is None):
        return dict(held)
    return {**held, "limit": size if limit is None else min(size, limit)}


def _optimizer(held: Mapping[str, Any]) -> dict[str, Any]:
    if "betas" in held or not {"beta1", "beta2"} & held.keys():
        return dict(held)
    return {**held, "betas": [held.get(name, default) for name, default in zip(("beta1", "beta2"), BETAS, strict=True)]}


def in_older_form(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """A whole configuration of the present form, as JSON values, in the older form, except `evaluation`."""
    critic = resolved["critic"]
    return {
        **resolved,
        "rewards": [reward_in_older_form(reward) for reward in resolved["rewards"]],
        "data": data_in_older_form(resolved["data"]),
        "optimizer": _optimizer_in_older_form(resolved["optimizer"]),
        "critic": {**critic, "optimizer": _optimizer_in_older_form(critic["optimizer"])},
    }


def reward_in_older_form(reward: Mapping[str, Any]) -> dict[str, Any]:
    """A reward of the present form, as JSON values, in the older form."""
    stops, names = reward["on_failure"] == _STOP, ARGUMENTS.get(reward["function"])
    arguments = (reward["arguments"] or {}) if names else {}
    return {
        **reward,
        "on_failure": _STOP if stops else _USE,
        "failure_reward": 0.0 if stops else reward["on_failure"],
        "arguments": None if names else reward["arguments"],
        **{name: arguments.get(name) for each in ARGUMENTS.values() for name in each},
    }


def data_in_older_form(data: Mapping[str, Any]) -> dict[str, Any]:
    """Data of the present form, as JSON values, in the older form."""
    if data["source"] != ARITHMETIC:
        return {**data, "size": SIZE}
    return {**data, "size": data["limit"] or SIZE, "limit": None}


def _optimizer_in_older_form(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in optimizer.items() if name != "betas"}
    return {**kept, **dict(zip(("beta1", "beta2"), optimizer["betas"], strict=True))}
