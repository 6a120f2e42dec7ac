"""The notice that the cloud will take this machine away: keeps the arrival of SIGTERM for later questions.

The module only records the notice. The session decides what follows: stop decoding, flush, exit with EXIT_CODE.
"""

import os
import select
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

# The only exit code that Flyte always counts as a system failure (a preemption, retried without using up the task's own
# retries). It counts 143 and 241, the codes after an unhandled SIGTERM, as either kind, by timing.
EXIT_CODE = 137


class PreemptionNotice:
    """Catches SIGTERM from its creation until `close`; a context manager. Any thread may ask it.

    PID 1 of a container ignores SIGTERM without a handler, and a process under a parent that forwards the signal dies
    before it can flush. With this object the notice arrives.
    """

    def __init__(self) -> None:
        """Install the handler; raises RuntimeError outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            thread = threading.current_thread().name
            raise RuntimeError(f"PreemptionNotice: created in thread {thread!r}; allowed: the main thread only")
        self._given = False
        # A pipe rather than threading.Event: Event.set() inside a handler deadlocks when the signal interrupts the
        # main thread within Event.wait().
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        self._closed = False

    @property
    def given(self) -> bool:
        """True once the notice has come; stays true, also after `close`."""
        return self._given

    def give(self) -> None:
        """Record a notice that came in another way, for example from the provider's metadata service."""
        if not self._given and not self._closed:
            self._given = True
            os.write(self._writer, b"!")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the notice comes or `timeout_s` seconds have passed (None: no limit); returns `given`.

        Python runs signal handlers in the main thread between bytecodes: while that thread is inside one long call
        into native code, the notice is seen when the call returns.
        """
        if not self._given and not self._closed:
            poll = select.poll()
            poll.register(self._reader, select.POLLIN)
            poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000.0)
        return self._given

    def close(self) -> None:
        """Put the previous handler back, without waking threads in `wait`. Main thread only; may be called twice."""
        if self._closed:
            return
        # None stands for a handler that was not installed from Python and cannot be put back.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
        self._closed = True
        os.close(self._reader)
        os.close(self._writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.give()
