"""Conversion of a reward function's return values to outcomes; only this module checks counts, types and finiteness."""

import math
from collections.abc import Mapping
from itertools import islice
from numbers import Real
from typing import Any

from tasks.grading.reward import RewardOutcome

_SHOWN_CHARACTERS_MAX = 200


def batch_outcomes(returned: Any, count: int) -> list[RewardOutcome]:
    """An outcome for each of `count` completions; a wrong number of values is an error for every completion."""
    try:
        iterator = iter(returned) if not isinstance(returned, str | bytes | Mapping) else None
    except TypeError:
        iterator = None
    if iterator is None:
        return [RewardOutcome(None, f"returned {_shown(returned)}; allowed: a list of float or None")] * count
    values = list(islice(iterator, count + 1))  # a generator may have no end
    if len(values) != count:
        number = str(len(values)) if len(values) < count else f"more than {count}"
        return [RewardOutcome(None, f"returned {number} values for {count} completions")] * count
    return [value_outcome(value) for value in values]


def value_outcome(value: Any) -> RewardOutcome:
    """The outcome of a finite number, None (not applicable), or verl's dict with a finite number or None as "score".

    Any other value becomes an error. An outcome with an error is returned unchanged.
    """
    if isinstance(value, RewardOutcome) and value.error is not None:
        return value
    if isinstance(value, Mapping):
        if "score" not in value:
            return RewardOutcome(None, f"returned {_shown(value)}; allowed: a dict with 'score'")
        value = value["score"]
    if value is None:
        return RewardOutcome(None)
    number = _number(value)
    if number is None:
        return RewardOutcome(None, f"returned {_shown(value)}; allowed: float or None")
    if not math.isfinite(number):
        return RewardOutcome(None, f"returned {number}; allowed: a finite number or None")
    return RewardOutcome(number)


def _number(value: Any) -> float | None:
    if not isinstance(value, Real) and callable(getattr(value, "item", None)):
        try:
            value = value.item()  # a scalar of torch or NumPy
        except (TypeError, ValueError, RuntimeError):
            return None
    try:
        return float(value) if isinstance(value, Real) else None
    except (OverflowError, ValueError):
        return math.inf


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a user's class may do anything in its __repr__
        text = "a value"
    shown = text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "..."
    return f"{shown} of type {type(value).__name__}"
