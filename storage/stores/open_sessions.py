"""Closes the connections that flytekit leaves open when a process ends.

flytekit reads inputs and writes outputs through asynchronous file systems (s3fs, gcsfs, adlfs), and never closes their
sessions, as the owner of such a file system has to. Else aiohttp complains of each at the end of the process, at level
ERROR, also where all went well. Our own stores close their sessions themselves.
"""

import asyncio
import atexit
import gc
import os
import sys
from contextlib import suppress
from functools import cache
from typing import Any

CLOSE_S = 5.0


@cache
def close_at_exit() -> None:
    """Register the closing for the end of this process, before flytekit stops its loops."""
    atexit.register(_close_all, os.getpid())


def _close_all(process: int) -> None:
    aiohttp, asyn = sys.modules.get("aiohttp"), sys.modules.get("fsspec.asyn")
    # A child that is forked shares its parent's sockets.
    if aiohttp is None or process != os.getpid():
        return
    ours = None if asyn is None else asyn.loop[0]
    # A file system that connects to several regions names none of its sessions.
    for session in [found for found in gc.get_objects() if type(found) is aiohttp.ClientSession]:
        # At the end nothing can be done about what does not close.
        with suppress(Exception):
            _close(session, ours)


def _close(session: Any, ours: asyncio.AbstractEventLoop | None) -> None:
    """Close a session that is open, unless it is on the loop `ours`, of our own stores."""
    loop: asyncio.AbstractEventLoop = session._loop  # noqa: SLF001 - aiohttp has no public name for it
    if session.closed or loop is ours:
        return
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(session.close(), loop).result(CLOSE_S)
    else:
        session.connector.close()
