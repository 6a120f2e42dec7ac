"""Seeded draws: numbers that tools and environments draw from `random` and `numpy.random` follow from seeds.

Code written for a different trainer often draws without a seed. Requests run side by side in the threads of one
process, where seeds of the modules' own generators would mix, so each request gets generators of its own.
"""

import functools
import hashlib
import inspect
import random
import sys
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from types import ModuleType
from typing import Any

_GENERATORS: ContextVar["_Generators"] = ContextVar("generators")
# The modules whose functions follow.
_FOLLOWING: set[str] = set()


class _Generators:
    """The generators of one request, made at the first use."""

    def __init__(self, key: str) -> None:
        self._key = key

    @functools.cached_property
    def python(self) -> random.Random:
        return random.Random(self._key)

    @functools.cached_property
    def numpy(self) -> Any:
        numbers = memoryview(hashlib.sha256(self._key.encode()).digest()).cast("I").tolist()
        return import_module("numpy.random").RandomState(numbers)


def draw_from(key: str) -> None:
    """From now on, draws of the present context (coroutines, too) from the modules' functions follow from the key.

    Code in different contexts is not concerned, and neither are generators made by a user's code.
    """
    follow_seeds()
    _GENERATORS.set(_Generators(key))


def follow_seeds() -> None:
    """Prepare this process for `draw_from`: before a user's code is imported, which may take functions by name.

    NumPy is not imported for this purpose: functions that a user's code takes by name follow only if NumPy was imported
    before the call.
    """
    if "random" not in _FOLLOWING:
        _redirect(random, lambda generators: generators.python)
    if "numpy" in sys.modules and "numpy.random" not in _FOLLOWING:
        # NumPy loads it when it is first used; and another thread may be importing it now, which this waits for.
        _redirect(import_module("numpy.random"), lambda generators: generators.numpy)


def _redirect(module: ModuleType, chosen: Callable[[_Generators], Any]) -> None:
    """Have the module's functions, which are methods of its own generator, ask the context's."""
    own = inspect.unwrap(module.random).__self__
    for name in dir(module):
        function = getattr(module, name)
        if getattr(function, "__self__", None) is own:
            setattr(module, name, _following(function, name, chosen))
    _FOLLOWING.add(module.__name__)


def _following(function: Callable[..., Any], name: str, chosen: Callable[[_Generators], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def drawn(*values: Any, **named: Any) -> Any:
        generators = _GENERATORS.get(None)
        return (function if generators is None else getattr(chosen(generators), name))(*values, **named)

    return drawn
