"""The message of Ctrl-C: the kept work, and the command that continues the run."""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from resources.granted import is_in_a_pod
from resources.visible_text import visible
from storage.records.run import first_open
from storage.stores.connect import connect
from storage.stores.store import StorageError

COUNT = "--count"
# Of a command that Ctrl-C has ended, as in shells.
EXIT_CODE = 130
_ENDING = b"\ninterrupted: the processes of this command write what they have, and end within half a minute\n"


@contextmanager
def announced_interruption(run_url: str, count: int | None = None) -> Iterator[None]:
    """On this machine, let Ctrl-C in the block end the process with a line on standard error and EXIT_CODE.

    A first line answers Ctrl-C at once. In a pod nothing is done. Between the last line and the end of all child
    processes another Ctrl-C ends the process at once.

    count: how many iterations the command adds to the run; None if it adds none.
    """
    if is_in_a_pod():
        yield
        return
    earlier = _handles(_hear)
    before = _committed(run_url)
    try:
        yield
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            now = _committed(run_url)
            left = None if count is None or before is None or now is None else max(0, count - (now - before))
            further = "nothing of what was asked for is left" if left == 0 else f"go on by: {command(sys.argv, left)}"
            click.echo(visible(f"interrupted: {_kept(run_url, now)}; {further}"), err=True)
        _handles(lambda *_: os._exit(EXIT_CODE))
        sys.exit(EXIT_CODE)
    except BaseException:
        _handles(earlier)
        raise
    _handles(earlier)


def _hear(*_: object) -> None:
    # A handler may not use the streams that it may have interrupted. A terminal shows a line of progress there.
    os.write(2, _ENDING if os.isatty(2) else _ENDING.lstrip())
    raise KeyboardInterrupt


def _handles(handler: Any) -> Any:
    """Let `handler` handle Ctrl-C from now on, where this thread may say so; returns the earlier one.

    flytekit's own ends the process without a word, and with the status of any failure.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)


def command(words: Sequence[str], count: int | None = None) -> str:
    """A command line as it is to be given again, with this `--count` in place of its own."""
    again = [Path(words[0]).name, *words[1:]]
    for place, word in enumerate(again if count is not None else []):
        if word == COUNT and place + 1 < len(again):
            again[place + 1] = str(count)
        elif word.startswith(f"{COUNT}="):
            again[place] = f"{COUNT}={count}"
    return shlex.join(again)


def _kept(run_url: str, committed: int | None) -> str:
    if committed is None:
        return f"what {run_url} holds stays there"
    iterations = f"{committed} committed iteration{'s' * (committed != 1)}"
    return f"{run_url} keeps its {iterations}, and all that was generated and recorded after that"


def _committed(run_url: str) -> int | None:
    """The number of committed iterations, 0 if there is no run; None if it cannot be read now."""
    try:
        return first_open(connect(run_url))
    except (StorageError, ValueError, LookupError, OSError):
        return None
