"""Functions of a user's own, which the configuration names as "package.module:function"."""

import importlib
import re
from typing import Any

PATTERN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAMES_CHARACTERS_MAX = 500


class NotAFunction(ValueError):  # noqa: N818 - reads as what was found
    """The module has no such name, or the name is of something that cannot be called."""


def load_function(spec: str) -> Any:
    """Import the module of "package.module:function" and return the function, which may be any callable.

    Raises NotAFunction, or whatever importing the module raises.
    """
    module_name, _, path = spec.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            there = ", ".join(name for name in dir(found) if not name.startswith("_"))
            raise NotAFunction(f"{module_name} has no {part!r}; there are: {there[:_NAMES_CHARACTERS_MAX]}")
        found = getattr(found, part)
    if not callable(found):
        raise NotAFunction(f"it is of type {type(found).__name__}; allowed: a function")
    return found
