"""Tools and environments of tests; child processes import this module by name."""

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from resources.wire import pack
from tasks.turns.current_call import current_call


def note(line: str) -> None:
    """Append to the file that a test names: what a second call would show."""
    with Path(os.environ["TOOL_NOTES"]).open("a") as notes:
        notes.write(f"{os.getpid()} {line}\n")


def first_time(name: str) -> bool:
    """Whether no process has come here before in this test."""
    try:
        Path(f"{os.environ['TOOL_NOTES']}.{name}").open("x").close()
    except FileExistsError:
        return False
    return True


def add(a: int, b: int) -> int:
    """Adds."""
    note("add")
    return a + b


def fails(text: str) -> str:
    """Raises."""
    raise ValueError(text)


def leaves() -> str:
    """Raises SystemExit."""
    sys.exit(3)


async def leaves_async() -> str:
    """Raises SystemExit on the event loop."""
    sys.exit(4)


def dies() -> str:
    """Ends its process, always."""
    note("dies")
    os._exit(7)


def dies_once() -> str:
    """Ends its process when it is called first."""
    note(f"dies_once {current_call().call_id}")
    if first_time("dies_once"):
        os.kill(os.getpid(), 9)
    return "alive"


def sleeps(seconds: float) -> str:
    """Waits."""
    note("sleeps")
    time.sleep(seconds)
    return "awake"


async def sleeps_async(seconds: float) -> str:
    """Waits on the event loop."""
    await asyncio.sleep(seconds)
    return f"{id(asyncio.get_running_loop())} {current_call().call_id}"


def meets(others: int) -> str:
    """Returns when so many calls run at once."""
    mine = Path(f"{os.environ['TOOL_NOTES']}.meets.{current_call().call_id}")
    mine.touch()
    deadline_s = time.monotonic() + 300
    while len(list(mine.parent.glob("*.meets.*"))) < others:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return "met"


def holds_the_interpreter() -> str:
    """Never lets another thread run."""
    ctypes.PyDLL(None).sleep(1000)
    return ""


def stops_its_process() -> str:
    """Stops its process, as from outside."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
    return ""


def replies() -> int:
    """The descriptor of the worker's replies: the pipe above the standard streams to which it writes."""
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(int(each.name), fcntl.F_GETFL)
            if int(each.name) > 2 and str(each.readlink()).startswith("pipe:") and flags & os.O_WRONLY:
                return int(each.name)
    raise AssertionError("there is no pipe")


def writes_half_a_reply() -> str:
    """Writes the header of a long reply, which swallows those that follow, and does not come back."""
    os.write(replies(), (1 << 20).to_bytes(8, "big"))
    time.sleep(1000)
    return ""


def forges() -> str:
    """Answers other calls: by each number that they could have."""
    for request in range(20):
        for name in (request, str(request)):
            os.write(replies(), pack({"request": name, "result": "FORGED", "outcome": "answered"}))
    return "forged"


def forks_twice() -> str:
    """Leaves a process behind whose parent has ended, in a session of its own; returns its number."""
    code = (
        "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3, stderr=-3).pid)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def note_once() -> str:
    """Notes, and takes its time."""
    note("note_once")
    time.sleep(1000)
    return ""


def variables() -> list[str]:
    """The names of its environment variables."""
    return list(os.environ)


class Stops:
    """An environment whose state can be set."""

    def reset(self, **columns: Any) -> None:
        """Begin."""

    def go(self, stop: bool) -> str:
        """Go.

        Args:
            stop: Whether to stop the process.
        """
        if stop:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)
        return "went"

    def get_state(self) -> dict[str, int]:
        return {}

    def set_state(self, state: dict[str, int]) -> None:
        pass


def enormous() -> str:
    """Returns 100 MB."""
    return "x" * 100_000_000


def chatty() -> str:
    """Prints."""
    sys.stdout.write("to the terminal" * 10_000)
    os.write(1, b"and below Python\n")
    return sys.stdin.read()


def forks() -> str:
    """Forks, and both processes return."""
    child = os.fork()
    return "child" if child == 0 else "parent"


def starts() -> str:
    """Starts a process that outlives it, in a session of its own, then waits."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    note(str(child.pid))
    time.sleep(600)
    return ""


def starts_and_dies() -> str:
    """Starts a process that outlives it, then ends its own."""
    note(str(subprocess.Popen(["sleep", "600"]).pid))
    os._exit(9)


def shapes(kind: str) -> Any:
    """Returns what is no text."""
    kinds = {"dict": {"é": [1, None]}, "none": None, "set": [{1}], "surrogate": "a\ud800b", "float": 0.5}
    return kinds[kind]


def who() -> str:
    """Says which call it is."""
    call = current_call()
    return json.dumps([call.call_id, call.epoch, call.iteration, call.response])


class Counter:
    """An environment that can do no more than TRL asks for."""

    def __init__(self) -> None:
        self.total = 0

    def reset(self, start: int, seed: int, **columns: Any) -> str | None:
        self.total = start
        note(f"reset {start} {seed} {sorted(columns)}")
        return f"from {start}"

    def count(self, n: int) -> str:
        """Counts on."""
        note("count")
        self.total += n
        return f"total {self.total}"

    def sleep(self, seconds: float) -> str:
        """Waits."""
        note("sleep")
        time.sleep(seconds)
        return "awake"

    def die(self) -> str:
        """Ends its process when it is called first."""
        if first_time("die"):
            os._exit(9)
        return f"alive at {self.total}"

    def die_always(self) -> str:
        """Ends its process."""
        os._exit(9)

    def get_reward(self) -> float:
        return float(self.total)


class Stateful(Counter):
    """Can say and set its state."""

    def get_state(self) -> Any:
        return {"total": self.total}

    def set_state(self, state: Any) -> None:
        note("set_state")
        self.total = state["total"]


class Large(Stateful):
    """Its state does not fit into an event."""

    def get_state(self) -> Any:
        return {"total": self.total, "more": "x" * 100_000}


class NoState(Stateful):
    def get_state(self) -> Any:
        return {1, 2}


class Restoring(Counter):
    """Goes through recorded turns."""

    def restore(self, turns: list[dict[str, Any]]) -> None:
        note(f"restore {json.dumps(turns)}")
        for turn in turns:
            for call in turn["calls"]:
                if call["name"] == "count":
                    self.total += call["arguments"]["n"]


class Drifting(Counter):
    """Answers otherwise each time."""

    def count(self, n: int) -> str:
        """Counts on."""
        return f"total {random.SystemRandom().random()}"


class Waiting(Counter):
    """Everything is a coroutine."""

    async def reset(self, start: int, **_columns: Any) -> str | None:
        await asyncio.sleep(0)
        self.total = start
        return None

    async def count(self, n: int) -> str:
        """Counts on."""
        await asyncio.sleep(0)
        self.total += n
        return str(self.total)

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return self.total / 2


class Broken(Counter):
    def __init__(self) -> None:
        raise RuntimeError("no such server")


class Wordless(Counter):
    def reset(self, **_columns: Any) -> Any:
        return 5


class Greedy(Counter):
    def get_reward(self) -> float:
        return float("nan")


class Unrewarding(Counter):
    def get_reward(self) -> float:
        raise ValueError("no answer yet")


class Closing(Counter):
    def close(self) -> None:
        note("closed")


def names_of(functions: Any, environment: Any) -> list[dict[str, Any]]:
    """Schemas as short as can be."""
    return [{"names": sorted(each.__name__ for each in functions), "environment": environment.__name__}]
