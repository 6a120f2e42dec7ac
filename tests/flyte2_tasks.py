"""Tasks of Flyte 2 for tests/workflows_flyte2; processes of members import this module by name."""

import os
import signal
import time
from pathlib import Path

import flyte
from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from workflows_flyte2.carried import carried
from workflows_flyte2.crews import group
from workflows_flyte2.member_process import carried_apart

ENVIRONMENT = flyte.TaskEnvironment("tests")
ONCE_MORE = {"short_name": "elements", "retries": flyte.RetryStrategy(1)}


@task
def element(slot: int, folder: str) -> int:
    """Square a number; 1 is killed in its first attempt, 2 asks for another, 3 always fails, 4 always dies."""
    attempt = len(list(Path(folder).glob(f"{slot}-*")))
    Path(folder, f"{slot}-{attempt}").touch()
    if (slot == 1 and attempt == 0) or slot == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if slot == 2 and attempt == 0:
        raise FlyteRecoverableException("again, please")
    if slot == 3:
        raise ValueError("three is not allowed")
    return slot * slot


@task
def waits(slot: int, folder: str) -> int:
    """Wait for SIGTERM, and say that it came; 1 fails once another waits."""
    if slot == 1:
        while not Path(folder, "waits").exists():
            time.sleep(0.02)
        raise ValueError("one is not allowed")

    def flush(*_: object) -> None:
        Path(folder, "flushed").touch()
        os._exit(137)

    signal.signal(signal.SIGTERM, flush)
    Path(folder, "waits").touch()
    for _ in range(6000):
        time.sleep(0.1)
    return slot


inside = ENVIRONMENT.task(carried(element, __name__))
apart = ENVIRONMENT.task(carried_apart(element, __name__))
waiting = ENVIRONMENT.task(carried_apart(waits, __name__))


@ENVIRONMENT.task
async def elements(config: dict, folder: str) -> list[str]:  # type: ignore[type-arg]
    """The outcomes of five members, in words."""
    return [str(each) for each in await group(apart, ONCE_MORE, config["slots"], config["width"], folder=folder)]


@ENVIRONMENT.task
async def element_inside(config: dict, folder: str) -> int:  # type: ignore[type-arg]
    """The same body in this process."""
    squared: int = await inside.override(**ONCE_MORE)(slot=config["slot"], folder=folder)
    return squared
