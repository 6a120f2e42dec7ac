"""The notice that this machine will be taken away: SIGTERM, remembered for whoever asks.

Only records that the notice came; what to do about it (stop decoding, flush, exit with EXIT_CODE) is the session's.
"""

import os
import select
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

# The only exit code that Flyte always counts as a failure of the system (a preemption, retried without using up the
# task's own retries). 143 and 241, what an unhandled SIGTERM ends in, count as either, by timing.
EXIT_CODE = 137


class PreemptionNotice:
    """Catches SIGTERM from its creation until `close`; a context manager. Ask from any thread.

    A process that is PID 1 of its container ignores SIGTERM without a handler, and one under a forwarding parent dies
    before it could flush: creating this object is what makes the notice arrive.
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
        """True once the notice came; stays true, also after `close`."""
        return self._given

    def give(self) -> None:
        """Record a notice that came another way, for example from the provider's metadata service."""
        if not self._given and not self._closed:
            self._given = True
            os.write(self._writer, b"!")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the notice comes or `timeout_s` seconds passed (None: no limit); returns `given`.

        Python runs signal handlers in the main thread between bytecodes: while that thread is inside one long call
        into native code, the notice is seen when the call returns.
        """
        if not self._given and not self._closed:
            poll = select.poll()
            poll.register(self._reader, select.POLLIN)
            poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000.0)
        return self._given

    def close(self) -> None:
        """Put the previous handler back; wakes nobody. Main thread only. A second call does nothing."""
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
