"""A child process that runs a user's code: how its parent starts and ends it, and how it serves its parent.

Messages go over its standard input and output (wire.py). What the user's code prints goes to standard error. The child
leads a process group of its own, so what the code starts ends with it. When the parent ends, the child ends at once,
whatever it is doing.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from resources.process import descendants, end_with
from resources.wire import read_message

Inbox = queue.SimpleQueue[dict[str, Any]]
_ERROR_CHARACTERS_MAX = 1000
_PROJECT_ROOT = Path(__file__).resolve().parents[1]


def start(module: str) -> subprocess.Popen[bytes]:
    """Start `python -m module`, which calls `serve_parent`. Both pipes are non-blocking here.

    The child gets SIGTERM when the calling thread ends, so that thread must live as long as the child is wanted.
    """
    # Each once: flytekit adds a folder again for every task it meets, and the length of a variable is limited.
    paths = dict.fromkeys([*(path or str(Path.cwd()) for path in sys.path), str(_PROJECT_ROOT)])
    process = subprocess.Popen(  # noqa: S603 - this interpreter and a module of ours
        # -P: the child's working directory is not on its module path, unless it is on this process's.
        [sys.executable, "-P", "-u", "-m", module, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and the processes that it started, and wait for its end. Its pipes stay open.

    If the child has ended by itself, what it leaves in its group ends, too, unless this process has read its status:
    from then on the system may give the group's number to other processes.
    """
    if process.returncode is None:
        # Those that have left its group are found by their parents.
        started = descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for each in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
    process.wait()


def await_end(process: subprocess.Popen[bytes]) -> None:
    """Wait until the child has ended; `end` is still to be called."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def serve_parent() -> tuple[Inbox, BinaryIO]:
    """In the child, before anything else: the parent's messages as they come, and the stream for the replies."""
    requests, replies = _take_standard_streams()
    inbox: Inbox = queue.SimpleQueue()
    # This runs in a thread of its own, so that the parent's end is noticed even during a call that never returns.
    threading.Thread(target=_read_requests, args=(requests, inbox), daemon=True).start()
    return inbox, replies


def end_with_parent() -> None:
    """In the child: have it end even if a call holds the interpreter when the thread that started it ends."""
    end_with(int(sys.argv[1]))


def describe(error: BaseException, *, place: bool = True) -> str:
    """What a user's code raised as one short text, with the file and line of it if `place`."""
    frames = traceback.extract_tb(error.__traceback__) if place else []
    here = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - a user's class may do anything in its __str__
        text = type(error).__name__
    return text[:_ERROR_CHARACTERS_MAX] + here


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol's pipes away from descriptors 0 and 1, so that user code can neither read nor write them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _read_requests(requests: BinaryIO, inbox: Inbox) -> None:
    while (message := read_message(requests)) is not None:
        inbox.put(message)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)
