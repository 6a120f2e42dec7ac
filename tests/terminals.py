"""Commands whose standard error, or both streams, are a real terminal (a pseudo-terminal of the kernel)."""

import os
import pty
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Shown:
    """What a command gave to a pipe as standard output, and what the terminal got."""

    code: int
    output: str
    terminal: str


def on_terminal(*command: object, whole: bool = False, **environment: str) -> Shown:
    """Run a Python program with standard error on a terminal of 120 columns; standard output, too, if it is `whole`."""
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    got: list[bytes] = []
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**kept, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40", **environment},
        stdin=subprocess.DEVNULL,
        stdout=theirs if whole else subprocess.PIPE,
        stderr=theirs,
        cwd=ROOT,
    ) as child:
        os.close(theirs)
        reader = threading.Thread(target=_read, args=(ours, got))
        reader.start()
        output, _ = child.communicate()
    reader.join()
    os.close(ours)
    return Shown(child.returncode, (output or b"").decode(), b"".join(got).decode())


def _read(terminal: int, got: list[bytes]) -> None:
    try:
        while piece := os.read(terminal, 65536):
            got.append(piece)
    except OSError:  # what Linux answers when the last process has left the terminal
        pass
