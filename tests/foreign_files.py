"""What another user of the machine may put where a file or a folder of ours is expected."""

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ANOTHER_USER = 54321
LIMIT_S = 60.0


def _socket(path: Path) -> None:
    # A socket's address is short, and a test's folder need not be.
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(path.parent, os.O_PATH)
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def _link_to(kind: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        target = path.parent / f"{path.name}-target"
        {"file": Path.touch, "folder": Path.mkdir, "pipe": os.mkfifo, "nothing": lambda _: None}[kind](target)
        path.symlink_to(target)

    return make


def _of_another(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        make(path)
        if os.geteuid():
            pytest.skip("only root can give a file to another user")
        os.chown(path, ANOTHER_USER, ANOTHER_USER)

    return made


def _writable(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        make(path)
        path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o022)

    return made


NEITHER: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a pipe of another user": _of_another(os.mkfifo),
    "a socket": _socket,
    "a link to a file": _link_to("file"),
    "a link to a folder": _link_to("folder"),
    "a link to a pipe": _link_to("pipe"),
    "a link to nothing": _link_to("nothing"),
    "another user's file": _of_another(Path.touch),
    "another user's folder": _of_another(Path.mkdir),
}
NO_FILE = NEITHER | {"a folder": Path.mkdir, "a file that all may write": _writable(Path.touch)}
NO_FOLDER = NEITHER | {"a file": Path.touch, "a folder that all may write": _writable(Path.mkdir)}


def is_there_still(path: Path) -> bool:
    return os.path.lexists(path)


def in_time(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises; fails if it waits for another."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert outcome, "it waits for what another user has put there"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
