"""Functions of a user's own, which the configuration names as "package.module:function"."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage.errors import UserCodeError

PATTERN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAMES_CHARACTERS_MAX = 500


class NotAFunction(UserCodeError, ValueError):  # noqa: N818 - reads as what was found
    """The module has no such name, or the name is of something that cannot be called."""


def load_function(spec: str) -> Any:
    """Import the module of "package.module:function" and return the function, which may be any callable.

    Raises NotAFunction, or whatever importing the module raises.
    """
    module_name, _, path = spec.partition(":")
    found: Any = _imported(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            there = ", ".join(name for name in dir(found) if not name.startswith("_"))
            raise NotAFunction(f"{module_name} has no {part!r}; there are: {there[:_NAMES_CHARACTERS_MAX]}")
        found = getattr(found, part)
    if not callable(found):
        raise NotAFunction(f"it is of type {type(found).__name__}; allowed: a function")
    return found


def _imported(module_name: str) -> Any:
    """The module; the error for a missing module says which folders were searched."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            # The module is there, and imports what is not.
            raise
        installed = (sys.prefix, sys.base_prefix)
        own = [Path(each) for each in sys.path if not each.startswith(installed)]
        folders = dict.fromkeys(str(each.resolve()) for each in own if each.is_dir())
        searched = ", ".join([*folders, "the installed packages"])
        raise ModuleNotFoundError(f"{error}; searched: {searched}", name=error.name) from None


def load_or_refuse(spec: str, refused: Callable[[str], ValueError]) -> Callable[..., Any]:
    """As `load_function`, but raises what `refused` makes of the reason, whatever importing the module raises."""
    try:
        function: Callable[..., Any] = load_function(spec)
    except NotAFunction as error:
        raise refused(str(error)) from None
    except (Exception, SystemExit) as error:
        raise refused(f"importing it raises {type(error).__name__}: {error}") from error
    return function
