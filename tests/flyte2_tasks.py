"""Tasks of Flyte 2 for tests/workflows_flyte2; processes of members import this module by name."""

import os
import signal
import threading
import time
from pathlib import Path

import flyte
from flytekit import Deck, task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.granted import is_in_a_pod
from resources.notice import EXIT_CODE, PreemptionNotice
from tasks.plan import execution_name
from workflows_flyte2.carried import carried, in_a_thread
from workflows_flyte2.crews import Beside, group
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
def waits(folder: str) -> str:
    """Wait for SIGTERM, write that it came, and end as a member does."""
    with PreemptionNotice() as notice:
        Path(folder, "waits").touch()
        if notice.wait():
            Path(folder, "flushed").touch()
            os._exit(EXIT_CODE)
    return "no notice"


@task(enable_deck=True)
def seen(folder: str) -> str:
    """What a body sees of Flyte, and a Deck."""
    Deck("Seen", f"<p>{folder}</p>")
    return f"{execution_name()} {is_in_a_pod()} {threading.current_thread() is threading.main_thread()}"


INSIDE = ENVIRONMENT.task(carried(element, __name__))
APART = ENVIRONMENT.task(carried_apart(element, __name__))
WAITS = ENVIRONMENT.task(carried_apart(waits, __name__))
SEEN = ENVIRONMENT.task(carried(seen, __name__), report=True)


@ENVIRONMENT.task
async def elements(config: dict, folder: str) -> list[str]:  # type: ignore[type-arg]
    """The outcomes of five members, in words."""
    return [str(each) for each in await group(APART, ONCE_MORE, config["slots"], config["width"], folder=folder)]


@ENVIRONMENT.task
async def element_inside(config: dict, folder: str) -> int:  # type: ignore[type-arg]
    """The same body in this process."""
    squared: int = await INSIDE.override(**ONCE_MORE)(slot=config["slot"], folder=folder)
    return squared


def until_there(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


@ENVIRONMENT.task
async def ends_early(config: dict, folder: str) -> str:  # type: ignore[type-arg]
    """Fail while a member works."""
    del config
    beside = Beside()
    beside.start(WAITS(folder=folder))
    try:
        await in_a_thread(until_there, Path(folder, "waits"))
        raise ValueError("enough")
    finally:
        await beside.end(0.0)
