"""Tools and environments in child processes, as tests open them."""

import os
from collections.abc import Callable
from typing import Any

from resources.process import descendants
from tasks.configuration.turns import TurnsConfig
from tasks.turns.living_environments import Reset
from tasks.turns.opened_environments import ProcessEnvironments
from tests.processes import command, parent

Open = Callable[..., ProcessEnvironments]
RESET = Reset({"start": 3, "more": "m"}, 99, "from 3")


def no_objects(iteration: int, digest: str) -> bytes:
    raise AssertionError(iteration, digest)


def config(*tools: str, environment: str | None = None, **settings: Any) -> TurnsConfig:
    named = tuple(f"tests.tool_functions:{name}" for name in tools)
    one = environment and f"tests.tool_functions:{environment}"
    return TurnsConfig(**{"processes": 1, "tools": named, "environment": one} | settings)


def workers() -> list[int]:
    """The processes that run tools, without their keepers, which are their parents."""
    named = [each for each in descendants(os.getpid()) if "environment_worker" in command(each)]
    return [each for each in named if parent(each) in named]
