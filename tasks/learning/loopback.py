"""How ranks that one process has started on one machine find each other, without a port that is chosen beforehand."""

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]  # the stubs do not export it

ADDRESS = "127.0.0.1"
POLL_INTERVAL_S = 0.01


def loopback_store(folder: Path, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The first rank's store, which listens on the loopback interface only; all ranks of this machine must call it.

    folder: of these ranks alone, and empty at first. Also tells gloo and NCCL to use that interface, unless the
    environment names one. Raises TimeoutError if the first rank does not come.
    """
    if sys.platform == "linux":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    file = folder / "port"
    if rank == 0:
        listener = socket.socket()
        listener.bind((ADDRESS, 0))
        listener.listen(world_size)
        port = listener.getsockname()[1]
        store = TCPStore(
            ADDRESS,
            port,
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        written = file.with_suffix(".part")
        written.write_text(str(port))
        written.rename(file)
        return store
    until_s = time.monotonic() + timeout.total_seconds()
    while not file.exists():
        if time.monotonic() > until_s:
            raise TimeoutError(f"{file}: missing after {timeout}; allowed: written by the first of {world_size} ranks")
        time.sleep(POLL_INTERVAL_S)
    return TCPStore(
        ADDRESS, int(file.read_text()), world_size, is_master=False, timeout=timeout, wait_for_workers=False
    )
