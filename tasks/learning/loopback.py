"""How ranks that one process has started on one machine find each other, and know that they are among themselves.

They meet in a file, which no port leads to. Gloo and NCCL listen on the loopback interface alone, which other users of
the machine can reach, too: NCCL's ranks know a number of their own, and gloo's prove to each other that they can read
the file.
"""

import hmac
import os
import secrets
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

# Between ranks that have joined already, on a busy machine.
PROOF_LIMIT = timedelta(minutes=5)
_PROOF_BYTES = 32
_SECRET = "secret"  # noqa: S105 - the name of a key


def file_store(folder: Path, world_size: int, timeout: timedelta) -> Store:
    """A store in the folder, for all ranks of this machine; gloo and NCCL use the loopback interface from now on.

    folder: of this user and these ranks alone, and empty at first. Whatever else the environment says is meant for
    ranks of several machines.
    """
    os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    os.environ.pop("NCCL_COMM_ID", None)
    store: Store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]  # no stub has it
    store.set_timeout(timeout)
    return store


def impostor(rank: int, world_size: int, store: Store) -> int | None:
    """The number of a peer in whose place something else has connected with this rank; None if there is none.

    All ranks call it, after they have joined. Every connection shows that both its ends know what is in the store.
    """
    if rank == 0:
        store.set(_SECRET, secrets.token_hex(32))
    secret, others = store.get(_SECRET), [peer for peer in range(world_size) if peer != rank]
    sent = [dist.isend(_tensor(_proof(secret, rank, peer)), peer) for peer in others]
    received = {peer: torch.zeros(_PROOF_BYTES, dtype=torch.uint8) for peer in others}
    for work in (*sent, *(dist.irecv(each, peer) for peer, each in received.items())):
        if work is not None:
            work.wait(PROOF_LIMIT)
    wrong = [
        peer
        for peer, each in received.items()
        if not hmac.compare_digest(each.numpy().tobytes(), _proof(secret, peer, rank))
    ]
    return wrong[0] if wrong else None


def _proof(secret: bytes, sender: int, receiver: int) -> bytes:
    """What the sender alone can say to the receiver alone."""
    return hmac.digest(secret, f"{sender}>{receiver}".encode(), "sha256")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
