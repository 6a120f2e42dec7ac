"""The end at a notice, for work that is replayed from records: this process and all it has started, at once.

For a process that has something to save first there is `resources.notice`. Does not know what is replayed.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from resources.notice import EXIT_CODE
from resources.process import descendants

_ROUNDS_MAX = 20
_ROUND_S = 0.05
_CLOSED = b"\0"
# The pipe of the block that this process is in.
_writers: list[int] = []
_forking = threading.local()


@contextmanager
def ends_on_notice() -> Iterator[None]:
    """End the process and its descendants when SIGTERM comes inside the block; it ends with EXIT_CODE.

    No `finally` is run. The end does not wait for the main thread, which may be inside native code for as long as a
    peer does not come, nor for a handler that a library installs inside the block. As PID 1 of a container a process
    without handlers would not even notice the signal. Outside the main thread, where Python allows no handlers,
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watcher = threading.Thread(target=_end_when_told, args=(reader,), name="notice", daemon=True)
    watcher.start()
    _writers.append(writer)
    # Handlers run in the main thread, between two bytecodes; the number of a signal is written to this pipe at once.
    earlier_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    earlier = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        # None stands for a handler that was not installed from Python and cannot be put back.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if earlier is None else earlier)
        signal.set_wakeup_fd(earlier_writer)
        _writers.remove(writer)
        # Behind a signal that a library made an exception of: the watcher sees that first, and does not return.
        os.write(writer, _CLOSED)
        watcher.join()
        os.close(writer)
        os.close(reader)


def _end_when_told(reader: int) -> None:
    while (told := os.read(reader, 1)) != _CLOSED:
        if told[0] == signal.SIGTERM:
            _end()


def _end(_number: int = signal.SIGTERM, _frame: FrameType | None = None) -> NoReturn:
    """Kill what this process has started, then end; from any thread, and from two at a time."""
    with suppress(OSError):
        # Not logged: a handler may have interrupted the logger. By two threads it may be said twice.
        os.write(2, b"notice (SIGTERM): this process and what it has started end now; what is recorded is replayed\n")
    for _ in range(_ROUNDS_MAX):
        # Again, because the main thread may have started another one meanwhile.
        alive = descendants(os.getpid())
        if not alive:
            break
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_ROUND_S)
    os._exit(EXIT_CODE)


def _before_fork() -> None:
    # What comes while the child still has the pipe waits until it has not.
    if _writers:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """Leave the pipe to the parent: a child that is forked and told to end would otherwise end its parent."""
    if _writers:
        current = signal.set_wakeup_fd(-1)
        if current not in _writers:
            signal.set_wakeup_fd(current)
        if signal.getsignal(signal.SIGTERM) is _end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _writers.clear()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
