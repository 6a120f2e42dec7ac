"""Rewards in the fields of older runs: what they held, and the form in which rewards enter the digest of a run.

An older reward has the settings of a built-in function as fields of its own, and the value of a failure beside the name
"use_failure_reward". The digest of a run has rewards in the older form, so an older run stays the same run.
"""

from collections.abc import Mapping
from typing import Any

# The arguments of built-in functions.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {"format": ("pattern",), "length": ("free_tokens", "scale_tokens")}
_USE, _STOP = "use_failure_reward", "stop"


def with_present_rewards(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document that a run holds, with its rewards in the present form; other values stay as they are."""
    found = dict(document)
    if isinstance(found.get("rewards"), list):
        found["rewards"] = [_present(each) for each in found["rewards"]]
    if isinstance(found.get("evaluation"), Mapping):
        found["evaluation"] = with_present_rewards(found["evaluation"])
    return found


def _present(reward: Any) -> Any:
    if not isinstance(reward, Mapping):
        return reward
    found = dict(reward)
    names = ARGUMENTS.get(str(found.get("function")), ())
    given = {name: found[name] for name in names if found.get(name) is not None}
    if given:
        found["arguments"] = given
    if found.get("on_failure") == _USE:
        found["on_failure"] = found.get("failure_reward", 0.0)
    return found


def in_older_form(reward: Mapping[str, Any]) -> dict[str, Any]:
    """A reward of the present form, as JSON values, in the older form."""
    stops, names = reward["on_failure"] == _STOP, ARGUMENTS.get(reward["function"])
    arguments = reward["arguments"] or {}
    return {
        **reward,
        "on_failure": _STOP if stops else _USE,
        "failure_reward": 0.0 if stops else reward["on_failure"],
        "arguments": reward["arguments"] if names is None else None,
        **{
            name: arguments.get(name) if names and name in names else None
            for each in ARGUMENTS.values()
            for name in each
        },
    }
