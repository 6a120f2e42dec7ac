"""Tasks for tests/tasks/test_local_map.py; child processes import this module by name."""

import os
import signal
import time
from pathlib import Path

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from storage.stores.store import StoreDenied
from tasks.configuration.references import PlanReference


@task(retries=1)
def element(number: int, folder: str) -> int:
    """Square a number; 1 is killed in its first attempt, 2 asks for another, 3 always fails, 4 always dies."""
    attempt = int(os.environ["FLYTE_ATTEMPT_NUMBER"])
    Path(folder, f"{number}-{attempt}-{os.getpid()}").touch()
    if (number == 1 and attempt == 0) or number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2 and attempt == 0:
        raise FlyteRecoverableException("again, please")
    if number == 3:
        raise ValueError("three is not allowed")
    return number * number


@task
def refused(slot: int, plan: PlanReference) -> int:
    """A slot that the store refuses; 7 is not refused."""
    if slot != 7:
        raise StoreDenied(f"cannot put 'x':\nthe token of slot {slot} has expired")
    return slot


@task
def stops(number: int, folder: str) -> int:
    """Stop this process in its first attempt, or, for the number 2, the one that has started it."""
    attempt = int(os.environ["FLYTE_ATTEMPT_NUMBER"])
    if attempt == 0:
        Path(folder, f"{number}-{attempt}-{os.getpid()}").touch()
        os.kill(os.getppid() if number == 2 else os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    return number


@task
def lasts(slot: int, folder: str) -> int:
    """Stay until a file `end` is there; 1 is killed in its first attempt."""
    attempt = int(os.environ["FLYTE_ATTEMPT_NUMBER"])
    Path(folder, f"{slot}-{attempt}-{os.getpid()}").touch()
    if slot == 1 and attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while not Path(folder, "end").exists():
        time.sleep(0.05)
    return slot


@task
def waits(number: int, folder: str) -> int:
    """Wait for SIGTERM, and say that it came."""

    def flush(*_: object) -> None:
        Path(folder, f"flushed-{number}").touch()
        os._exit(137)

    signal.signal(signal.SIGTERM, flush)
    Path(folder, f"waits-{number}-{os.getpid()}").touch()
    # The kernel may give a continued process's signal to another thread, which ends no sleep of the main thread.
    for _ in range(6000):
        time.sleep(0.1)
    return number


@task
def threads(number: int) -> int:
    """The number of threads for which the process may use a core each."""
    return int(os.environ["OMP_NUM_THREADS"])
