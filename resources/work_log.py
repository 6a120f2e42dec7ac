"""The present work of a process as plain lines on standard error: the log of a pod, or of a command without terminal.

Code that works calls `at_work`, at any depth. `work_log` writes the lines: at the beginning, at each change, again
during a long work, and at the end. Without a `work_log` nothing is written, and `at_work` costs nothing.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from resources.secret_text import environment_secrets, without_secrets
from resources.visible_text import shortened, visible_line

# A line at least once a minute, even if one comes late.
INTERVAL_S = 30.0
PLACE_CHARACTERS_MAX = 300
LINE_CHARACTERS_MAX = 800
# For lines that standard error does not take, as a pipe that no process reads.
LAST_LINE_MAX_S = 5.0


@dataclass(frozen=True, slots=True)
class _Work:
    what: str
    how_far: Callable[[], str]


class WorkLog:
    """The lines of one task. A thread writes the lines, for no work to wait for standard error."""

    def __init__(self, place: str, means: str = "", *, is_brief: bool = False) -> None:
        """place: whom the work is for, in words; each line begins with it.

        means: with which it is done, in words. is_brief: what is done is written only when it lasts, and an end only if
        it is a failure.
        """
        self._place = place
        self._is_brief = is_brief
        self._secrets = environment_secrets()
        self._items: queue.SimpleQueue[_Work | str | None] = queue.SimpleQueue()
        self._began_s = time.monotonic()
        self._what = ""
        self._has_ended = False
        self._items.put(f"begins, {means}" if means else "begins")
        self._thread = threading.Thread(target=self._write_all, name="work log", daemon=True)
        self._thread.start()

    def change(self, what: str, how_far: Callable[[], str]) -> None:
        """From now on this is done. how_far: is called now and then, in a thread of the log's."""
        self._items.put(_Work(what, how_far))

    def tell(self, line: str) -> None:
        """Write a line of its own."""
        self._items.put(line)

    def end(self, how: str = "ends") -> None:
        """Write the end of the work as the last line; does nothing the second time."""
        if not self._is_brief:
            self._end(how)
        self._finish()

    def fail(self, why: str) -> None:
        """The same of a failure."""
        self._end(f"failed: {why}")
        self._finish()

    def _end(self, how: str) -> None:
        if not self._has_ended:
            self._items.put(f"{how}, after {time.monotonic() - self._began_s:.0f} s")

    def _finish(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._items.put(None)
            self._thread.join(LAST_LINE_MAX_S)

    def _write_all(self) -> None:
        work, since_s = _Work("", str), time.monotonic()
        next_s = since_s + INTERVAL_S
        while True:
            try:
                item = self._items.get(timeout=max(0.0, next_s - time.monotonic()))
            except queue.Empty:
                self._write_work(work, since_s)
            else:
                if item is None:
                    return
                if isinstance(item, str):
                    self._write(item)
                elif item.what == work.what:
                    work = item
                    continue
                else:
                    work, since_s = item, time.monotonic()
                    if self._is_brief:
                        continue
                    self._write_work(work, since_s)
            next_s = time.monotonic() + INTERVAL_S

    def _write_work(self, work: _Work, since_s: float) -> None:
        far = ""
        # It looks at what other threads change, and must not end the log.
        with suppress(Exception):
            far = work.how_far()
        lasts_s = round(time.monotonic() - since_s)
        since = f" (for {lasts_s} s)" if lasts_s else ""
        self._write(f"{work.what or 'at work'}{since}{f': {far}' if far else ''}")

    def _write(self, text: str) -> None:
        at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        line = f"{at} {self._bounded(self._place, PLACE_CHARACTERS_MAX)}: {text}"
        # A log that cannot be written must not end the work.
        with suppress(OSError, ValueError):
            sys.stderr.write(self._bounded(line, LINE_CHARACTERS_MAX) + "\n")
            sys.stderr.flush()

    def _bounded(self, text: str, characters_max: int) -> str:
        return shortened(visible_line(without_secrets(text, self._secrets)), characters_max)


# The log of this process; None: nothing is written.
_logs: list[WorkLog] = []


@contextmanager
def work_log(place: str, means: str = "", *, is_brief: bool = False) -> Iterator[WorkLog]:
    """Write what is done in the block, and how it ends; the arguments are those of WorkLog."""
    log = WorkLog(place, means, is_brief=is_brief)
    _logs.append(log)
    try:
        yield log
    except Exception as error:
        log.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        # A forked child has no log; what it leaves here is its parent's block.
        if log in _logs:
            _logs.remove(log)
            log.end()


def at_work(what: str, how_far: Callable[[], str] = str) -> None:
    """State the work of this process from now on.

    how_far: returns progress and current wait in words; a second thread calls the function, which must not use a store.
    """
    for log in _logs[-1:]:
        log.change(what, how_far)


# A child that is forked has no thread that writes.
os.register_at_fork(after_in_child=_logs.clear)


@dataclass(slots=True)
class _Chain:
    """The iterations that a command on this machine adds to a run; count 0: none."""

    ended: int = 0
    count: int = 0


_chain = _Chain()


@contextmanager
def chain_of(count: int) -> Iterator[None]:
    """A block in which this process adds `count` iterations to a run, in sequence."""
    _chain.ended, _chain.count = 0, count
    try:
        yield
    finally:
        _chain.ended = _chain.count = 0


def end_one() -> None:
    """An iteration of the chain is committed."""
    _chain.ended += 1


def which_of_chain() -> str:
    """Which iteration of the chain is under way, such as " (3 of 12)"; empty outside a chain."""
    return f" ({min(_chain.ended + 1, _chain.count)} of {_chain.count})" if _chain.count else ""
