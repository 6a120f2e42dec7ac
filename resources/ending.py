"""Ends this process and every descendant on SIGTERM, for work that is replayed from records.

A process that must save something first uses `resources.notice`. The replay itself is the business of the callers.
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from resources.notice import EXIT_CODE
from resources.process import descendants

_ROUNDS_MAX = 20
_ROUND_S = 0.05
_CLOSED = b"\0"
# Both ends of the pipe of each block that this process is in.
_pipes: list[tuple[int, int]] = []
_forking = threading.local()


@contextmanager
def ends_on_notice() -> Iterator[None]:
    """End the process and its descendants when SIGTERM comes inside the block; it ends with EXIT_CODE.

    No `finally` is run. The end does not wait for the main thread, which may be in native code for as long as a peer
    does not answer, nor for a handler that a library installs inside the block. PID 1 of a container that installs no
    handler does not even receive the signal. Outside the main thread, where Python allows no handlers, the block
    changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = pipe = os.pipe()
    _pipes.append(pipe)
    os.set_blocking(writer, False)
    watcher = threading.Thread(target=_end_when_told, args=(reader,), name="notice", daemon=True)
    watcher.start()
    # Python runs handlers in the main thread, between bytecodes, but writes a signal's number to this pipe at once.
    earlier_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    earlier = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        # A forked child has no pipe; what it leaves here is its parent's block.
        if pipe in _pipes:
            _leave(pipe, watcher, earlier, earlier_writer)


def _leave(pipe: tuple[int, int], watcher: threading.Thread, earlier: Any, earlier_writer: int) -> None:
    reader, writer = pipe
    # None stands for a handler that was not installed from Python and cannot be put back.
    signal.signal(signal.SIGTERM, signal.SIG_DFL if earlier is None else earlier)
    signal.set_wakeup_fd(earlier_writer)
    _pipes.remove(pipe)
    # If a library turned the signal into an exception, its number is in the pipe before this byte: the watcher
    # reads it first and ends the process.
    os.write(writer, _CLOSED)
    watcher.join()
    os.close(writer)
    os.close(reader)


def _end_when_told(reader: int) -> None:
    while (told := os.read(reader, 1)) != _CLOSED:
        if told[0] == signal.SIGTERM:
            _end()


def _end(_number: int = signal.SIGTERM, _frame: FrameType | None = None) -> NoReturn:
    """Kill the descendants of this process and finally the process; may run in any thread, and in two at a time."""
    with suppress(OSError):
        # Not logged: a handler may have interrupted the logger. Two threads may both write this line.
        os.write(2, b"notice (SIGTERM): this process and what it has started end now; what is recorded is replayed\n")
    for _ in range(_ROUNDS_MAX):
        # Repeated, because the main thread may have started another process meanwhile.
        alive = descendants(os.getpid())
        if not alive:
            break
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_ROUND_S)
    os._exit(EXIT_CODE)


def _before_fork() -> None:
    # SIGTERM stays blocked until the child has given up the pipe.
    if _pipes:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """Leave the pipe to the parent: a child that is forked and told to end would otherwise end its parent."""
    if _pipes:
        current = signal.set_wakeup_fd(-1)
        if current not in (writer for _, writer in _pipes):
            signal.set_wakeup_fd(current)
        if signal.getsignal(signal.SIGTERM) is _end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for end in itertools.chain(*_pipes):
            os.close(end)
        _pipes.clear()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
