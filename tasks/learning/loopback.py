"""The meeting of ranks that a single process starts on a single machine, closed to foreign processes and users.

Ranks meet through a file, which no network port exposes. Gloo and NCCL listen on the loopback interface only, but the
machine's users share the loopback interface: NCCL's ranks know a unique number, and gloo's ranks prove to each other
that they can read the file.
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

    folder: an initially empty folder of this user, for the ranks alone. Rendezvous variables of the environment are
    ignored; only ranks on several machines use the variables.
    """
    os.environ |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    os.environ.pop("NCCL_COMM_ID", None)
    store: Store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]  # no stub has it
    store.set_timeout(timeout)
    return store


def impostor(rank: int, world_size: int, store: Store) -> int | None:
    """The number of a peer whose connection with this rank belongs to a foreign process; None if all are genuine.

    Every rank calls it after joining. Over every connection, both ends prove that they know the secret in the store.
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
    """The proof that only `sender` can give to only `receiver`: an HMAC of both numbers under the secret."""
    return hmac.digest(secret, f"{sender}>{receiver}".encode(), "sha256")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
