"""What a command prints with `--json`: JSON that every reader takes.

Python's own encoder writes NaN and Infinity, which are no JSON; here they are null, as in metrics.jsonl.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any


def json_output(value: Any) -> str:
    """One line: a dataclass, or mappings, lists and plain values, with null for each number that is not finite."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _finite(asdict(value))
    if isinstance(value, Mapping):
        return {_finite_key(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finite_key(name: Any) -> Any:
    return str(name) if isinstance(name, float) and not math.isfinite(name) else name
