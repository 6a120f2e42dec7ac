"""A child process that runs a user's code: start, end, and its answers to the parent.

Messages go over its standard input and output (wire.py). Prints of the user's code go to standard error. The child is
two processes: the keeper runs no code of the user; the worker runs the user's code, in a session of its own. When
worker or parent ends, the keeper ends every process that the worker has started, however often it has forked.
"""

import contextlib
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from resources.process import adopt_orphans, descendants, end_with
from resources.wire import pack, read_message

Inbox = queue.SimpleQueue[dict[str, Any]]
# Seconds for each start of a user's code: the import of a function, the construction of an environment, the first
# request of an agent, the weights of a reward model. Code that downloads or compiles once takes minutes.
LOAD_TIME_LIMIT_S = 600.0
_ERROR_CHARACTERS_MAX = 1000
_PROJECT_ROOT = Path(__file__).resolve().parents[1]
_END_LIMIT_S = 5.0
_ROUNDS_MAX = 500
_ROUND_S = 0.005
# Credentials of stores, of the hub and of Flyte's secrets: members and trainers need them, code of the user does not.
_WITHHELD = re.compile(
    r"(FLYTE_)?AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|SECURITY_TOKEN|TOKEN|(DEFAULT_)?PROFILE"
    r"|SHARED_CREDENTIALS_FILE|CREDENTIAL_FILE|CONFIG_FILE|ROLE_ARN|WEB_IDENTITY_TOKEN_FILE|CONTAINER_\w+)"
    r"|AZURE_(STORAGE_\w+|CLIENT_\w+|TENANT_ID|FEDERATED_TOKEN\w*|USERNAME|PASSWORD)|(IDENTITY|MSI)_(HEADER|SECRET)"
    r"|GOOGLE_(APPLICATION_CREDENTIALS|SERVICE_ACCOUNT\w*)"
    r"|HF_TOKEN(_PATH)?|HUGGING_?FACE_(HUB_)?TOKEN|_FSEC_\w+|FLYTE_(CLIENT_SECRET|CREDENTIALS_\w+)"
)


def visible_variables(named: Collection[str] = ()) -> dict[str, str]:
    """This process's environment variables, without the credentials that are not `named`."""
    return {name: value for name, value in os.environ.items() if name in named or not _WITHHELD.fullmatch(name)}


def start(module: str, named: Collection[str] = ()) -> subprocess.Popen[bytes]:
    """Start `python -m module`, which calls `serve_parent`. Both pipes are non-blocking here.

    named: names of credentials to pass on to the child as environment variables.
    """
    # Each once: flytekit adds a folder again for every task it meets, and the length of a variable is limited.
    paths = dict.fromkeys([*(path or str(Path.cwd()) for path in sys.path), str(_PROJECT_ROOT)])
    process = subprocess.Popen(  # noqa: S603 - this interpreter and a module of ours
        # -P: the child's working directory is not on its module path, unless it is on this process's.
        [sys.executable, "-P", "-u", "-m", module, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**visible_variables(named), "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and its descendants, and wait for its end. The pipes stay open."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_LIMIT_S)
    if process.returncode is None:
        # The keeper does not do its work, as when the user's code has stopped it.
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


class Replies:
    """The child's stream to its parent. A parent that is gone ends the child: nothing is left to answer."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._writing = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Write a message at once, whole; any thread may call this."""
        body = pack(message)
        try:
            with self._writing:
                self._stream.write(body)
                self._stream.flush()
        except BrokenPipeError:
            os._exit(0)


def serve_parent(*, ends_with_thread: bool = False) -> tuple[Inbox, Replies]:
    """In the child, before anything else: the parent's messages as they come, and where the replies go.

    It returns in the worker. ends_with_thread: the child also ends when the thread ends that has started it.
    """
    if ends_with_thread:
        end_with(int(sys.argv[1]))
    _go_on_kept()
    requests, replies = _take_standard_streams()
    inbox: Inbox = queue.SimpleQueue()
    # This runs in a thread of its own, so that the parent's end is noticed even during a call that never returns.
    threading.Thread(target=_read_requests, args=(requests, inbox), daemon=True).start()
    return inbox, Replies(replies)


def describe(error: BaseException, *, place: bool = True) -> str:
    """What a user's code raised as one short text, with the file and line of it if `place`."""
    frames = traceback.extract_tb(error.__traceback__) if place else []
    here = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - a user's class may do anything in its __str__
        text = type(error).__name__
    return text[:_ERROR_CHARACTERS_MAX] + here


def _go_on_kept() -> None:
    """Continue in a forked child; this process becomes the keeper of the child."""
    adopt_orphans()
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signals = (signal.SIGCHLD, signal.SIGTERM)
    for number in signals:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    keeper, worker = os.getpid(), os.fork()
    if worker:
        _keep(worker, told)
    signal.set_wakeup_fd(-1)
    for number in signals:
        signal.signal(number, signal.SIG_DFL)
    os.close(told)
    os.close(tell)
    os.setsid()
    end_with(keeper)


def _keep(worker: int, told: int) -> NoReturn:
    """Wait for the end of the worker or of the parent, end all descendants, and end as the worker does.

    told: where the numbers of signals arrive.
    """
    os.close(1)
    waiting, status, ends = select.poll(), None, False
    waiting.register(told, select.POLLIN)
    waiting.register(0, 0)  # the parent's end of the pipe is closed
    while status is None and not ends:
        for descriptor, _ in waiting.poll():
            ends = ends or descriptor == 0 or signal.SIGTERM in os.read(told, 64)
        status = _reap(worker)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    for _ in range(_ROUNDS_MAX):
        found = descendants(os.getpid())
        for each in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        reaped = _reap(worker)
        status = reaped if status is None else status
        if not found and status is not None:
            break
        time.sleep(_ROUND_S)
    code = os.waitstatus_to_exitcode(status or 0)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap(worker: int) -> int | None:
    """Collect all children that have ended; returns the status of the worker if the worker is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            status = found[1] if found[0] == worker else status
    return status


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
    os._exit(0)
