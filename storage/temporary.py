"""Temporary files of the local store: their names, and which of them no process will complete any more.

A name says which process writes. On the same machine a dead writer is known at once; elsewhere only age tells.
"""

import os
import re
import time
import uuid
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

TEMPORARY = ".tmp-"
NAME_PATTERN = re.compile(r"\.tmp-([0-9a-f]{16})-([0-9]{1,9})-[0-9a-f]{32}")
# A temporary file without a write for this long has no writer.
ABANDONED_S = 24 * 3600.0


def temporary_name() -> str:
    """A name that is never used twice."""
    return f"{TEMPORARY}{_process_space()}-{os.getpid()}-{uuid.uuid4().hex}"


def remove_all_abandoned(folder: Path) -> bool:
    """Remove the files of dead writers in a folder that holds nothing else; True if something was removed."""
    removed = False
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(TEMPORARY) or not remove_abandoned(entry):
                return False
            removed = True
    return removed


def remove_abandoned(entry: os.DirEntry[str]) -> bool:
    """Remove a temporary file whose writer is dead: True when it is gone.

    If the writer lives after all, its write fails with StoreUnavailable, and nothing else happens.
    """
    try:
        if _writer_is_dead(entry.name) or time.time() - entry.stat().st_mtime > ABANDONED_S:
            Path(entry.path).unlink()
            return True
    except FileNotFoundError:
        return True
    except OSError:
        # A reader without the right to delete can still list.
        return False
    return False


def _writer_is_dead(name: str) -> bool:
    """Whether a temporary file's name shows a dead process of this machine; False if that is unknown."""
    writer = NAME_PATTERN.fullmatch(name)
    if writer is None or writer[1] != _process_space():
        return False
    try:
        os.kill(int(writer[2]), 0)
        status = Path(f"/proc/{writer[2]}/stat").read_bytes()
    except ProcessLookupError:
        return True
    except OSError:
        return False
    # The state follows the name in parentheses. A zombie process is dead: only its parent has not noticed yet.
    return status.rpartition(b")")[2].split()[0] in (b"Z", b"X")


@cache
def _process_space() -> str:
    """16 hex digits that identify the kernel's boot and the namespace in which this process's number is valid.

    A host name would not do: containers share it, but not their process numbers.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        space = boot + bytes(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = uuid.uuid4().bytes
    return blake2b(space, digest_size=8).hexdigest()
