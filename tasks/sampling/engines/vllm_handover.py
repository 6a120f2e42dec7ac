"""The hand-over of tensors to vLLM's workers: both ends of it, without a file on a disk.

A worker in the owner's process gets the tensors themselves. For others, the owner of the engine holds files open, and a
worker of the same machine and user maps them by the owner's descriptors. So a file needs no name: what a weight cache
evicts stays readable, and what is in shared memory is gone as soon as the owner is, however it ends.
"""

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from storage.weights.mapped import MappedFile, write_at
from storage.weights.tensor_sets import ITEM_BYTES, TensorBlock
from tasks.sampling.engines.weight_tensors import as_torch

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - files in it have no name
_ALIGNMENT_BYTES = 64
# For each tensor: its name, the owner's descriptor, where its bytes begin, its dtype and its shape.
Places = list[list[Any]]
# What vLLM carries to another process as it is.
Handed = dict[str, Any]


@contextmanager
def handed(tensors: Mapping[str, TensorBlock], *, here: bool) -> Iterator[Handed]:
    """What a worker gets in place of the tensors, valid until the end of the block; raises OSError as `held_open`.

    here: the worker is in this process.
    """
    if here:
        yield {"tensors": {name: as_torch(block) for name, block in tensors.items()}}
        return
    with held_open(tensors) as places:
        yield {"owner": os.getpid(), "places": places}


def received(given: Handed) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `handed`, one after the other; do not write to them."""
    if "tensors" in given:
        return iter(given["tensors"].items())
    return mapped_tensors(given["owner"], given["places"])


@contextmanager
def held_open(tensors: Mapping[str, TensorBlock]) -> Iterator[Places]:
    """Where a worker finds the tensors until the end of the block: in mapped files, and else copied to shared memory.

    Raises OSError if shared memory has no room for what lies in no file; one line says how much is needed.
    """
    loose = {id(block): block for block in tensors.values() if block.place is None and block.num_bytes}
    with ExitStack() as stack:
        copies = stack.enter_context(_in_shared_memory(loose)) if loose else {}
        yield [[name, *_where(block, copies), block.dtype, list(block.shape)] for name, block in tensors.items()]


def mapped_tensors(owner: int, places: Places) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each open tensor of process `owner`, in mapped memory; raises OSError."""
    files: dict[int, MappedFile] = {}
    for name, descriptor, start, dtype, shape in places:
        num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        if num_bytes and descriptor not in files:
            with Path(f"/proc/{owner}/fd/{descriptor}").open("rb") as file:
                files[descriptor] = MappedFile(file.fileno())
        data = files[descriptor].data[start : start + num_bytes] if num_bytes else b""
        yield name, as_torch(TensorBlock(dtype, tuple(shape), data))


def _where(block: TensorBlock, copies: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    if block.place is not None:
        return block.place.file.descriptor, block.place.start
    return copies.get(id(block), (-1, 0))


@contextmanager
def _in_shared_memory(blocks: Mapping[int, TensorBlock]) -> Iterator[dict[int, tuple[int, int]]]:
    """The descriptor and place of each tensor in a file without a name, which is gone after the block."""
    starts, end = {}, 0
    for key, block in blocks.items():
        starts[key] = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        end = starts[key] + block.num_bytes
    with tempfile.TemporaryFile(dir=SHARED_MEMORY, buffering=0) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, end)
        except OSError as error:
            status = os.statvfs(SHARED_MEMORY)
            raise OSError(
                error.errno,
                f"{SHARED_MEMORY} has {status.f_bavail * status.f_frsize} bytes free; needed: {end}, for "
                "tensors that the weight cache does not hold",
            ) from None
        for key, block in blocks.items():
            write_at(file.fileno(), block.data, starts[key])
        yield {key: (file.fileno(), start) for key, start in starts.items()}
