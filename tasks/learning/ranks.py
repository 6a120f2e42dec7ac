"""Ranks: the processes that train one model together, and the ranks' communication besides gradients.

One process alone is the usual case: its collectives return their arguments. Several ranks of one machine are started by
`tasks.learning.started_ranks`, those of several machines by torchrun; both set environment variables. Values between
ranks travel as JSON, never as pickles. Sharding is in `tasks.learning.sharded`.
"""

import json
import logging
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from storage.errors import GleanerError
from storage.stores.store import StoreUnavailable
from tasks.learning.loopback import file_store, impostor
from tasks.learning.missed_ranks import MissedRanks, Position

log = logging.getLogger(__name__)
# Longer than the loading of the model on another node, and than the slowest upload of a tensor: a call to the store may
# take a second for each 8 MiB, so this is enough for 14 GiB.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# The first rank may wait for a rollout meanwhile; if it dies, the launcher ends the others.
BROADCAST_TIMEOUT = timedelta(days=2)

LAST_TENSORS_S = 0.2


class RankError(GleanerError, RuntimeError):
    """Another rank failed; its own message says which and why."""


class RankUnavailableError(RankError, StoreUnavailable):
    """Another rank's object store was unavailable; a later attempt may succeed."""


def misses_peer(error: Exception) -> bool:
    """Whether an error says only that a peer failed or is gone; the cause is known to the peer alone."""
    # Gloo has no type of its own; its errors begin with the file and line of its source that raised them. Nor has the
    # store that is a file.
    text = str(error)
    return isinstance(error, RankError | dist.DistError) or "/gloo/transport/" in text or text == "Wait timeout"


@dataclass(frozen=True)
class _Gang:
    """The means of communication among several ranks.

    Attributes:
        mesh: The one-dimensional device mesh of the ranks.
        store: A store of small values.
        broadcasts: The number of broadcasts so far, as a list of one item.
        meetings: The number of meetings so far, as a list of one item.
        position: This rank's position (`tasks.learning.missed_ranks`).
    """

    mesh: DeviceMesh
    store: Store
    broadcasts: list[int]
    meetings: list[int]
    position: Position


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks that train together. Not thread-safe; every rank calls methods in equal order.

    Attributes:
        rank: The number of this rank, from 0.
        world_size: The number of ranks.
        device: The device of this rank's parameters.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    gang: _Gang | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank follows the journal, records and publishes."""
        return self.rank == 0

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks in one dimension; ValueError for one rank."""
        return self._gang().mesh

    def barrier(self) -> None:
        """Return when every rank has called `barrier`."""
        self.all_sum([0.0])

    def meet(self) -> None:
        """A barrier at which ranks may arrive hours apart (BROADCAST_TIMEOUT).

        Waiting ranks do not occupy their devices. If a rank fails before its arrival, the launcher ends the waiting
        ranks.
        """
        if self.world_size == 1:
            return
        gang = self._gang()
        gang.meetings[0] += 1
        key = f"meeting/{gang.meetings[0]}"
        if gang.store.add(f"{key}/came", 1) == self.world_size:
            gang.store.set(key, "")
        gang.store.wait([key], BROADCAST_TIMEOUT)

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """The elementwise sums of all ranks' values, in float64, the same on every rank."""
        if self.world_size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

    def broadcast(self, document: Any = None) -> Any:
        """The first rank's `document`, on every rank; the arguments of other ranks are ignored.

        Ranks wait for the first rank for up to BROADCAST_TIMEOUT without occupying their devices. The document must be
        small and fit JSON, because the ranks' store carries the document.
        """
        if self.world_size == 1:
            return document
        gang = self._gang()
        gang.broadcasts[0] += 1
        key = f"broadcast/{gang.broadcasts[0]}"
        if self.is_first:
            gang.store.set(key, json.dumps(document))
            return document
        gang.store.wait([key], BROADCAST_TIMEOUT)
        return json.loads(gang.store.get(key))

    def gather(self, document: Any) -> list[Any]:
        """Every rank's document, which must fit JSON, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [document]
        own = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self._all_gather(torch.tensor([len(own)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = own
        rows = zip(lengths, self._all_gather(padded), strict=True)
        return [json.loads(row[:length].numpy().tobytes()) for length, row in rows]

    def gather_rows(self, rows: Mapping[int, torch.Tensor], dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """All ranks' rows by name, each one-dimensional, of floating `dtype`, on the CPU; equal on every rank."""
        if self.world_size == 1:
            return dict(rows)
        sizes = self.gather([[name, len(row)] for name, row in rows.items()])
        totals = [sum(length for _, length in each) for each in sizes]
        flat = torch.zeros(max(totals), dtype=torch.float64)
        if rows:
            flat[: totals[self.rank]] = torch.cat([row.double() for row in rows.values()])
        found: dict[int, torch.Tensor] = {}
        for each, values in zip(sizes, self._all_gather(flat), strict=True):
            parts = torch.split(values[: sum(length for _, length in each)].to(dtype), [length for _, length in each])
            found |= {name: part for (name, _), part in zip(each, parts, strict=True)}
        return found

    def deal(self, parts: Sequence[torch.Tensor], target: torch.Tensor, owner: int) -> None:
        """Copy part i of rank `owner` over the contiguous `target` of rank i, both on the CPU and of equal size.

        `parts` matters only on the owner. Parts travel as bytes, because gloo cannot send every dtype.
        """
        with self.gang.position.uneven() if self.gang is not None else nullcontext():
            if self.rank == owner:
                others = [(rank, _bytes(part)) for rank, part in enumerate(parts) if rank != owner and part.numel()]
                sends = [dist.isend(part, rank) for rank, part in others]
                target.copy_(parts[owner])
                for send in sends:
                    if send is not None:
                        send.wait()
            elif target.numel():
                dist.recv(_bytes(target), owner)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise on all ranks at the end of the block if one rank raises in it.

        Ranks without an error raise RankError, or RankUnavailableError if the cause is StoreUnavailable, instead of
        waiting for the failed rank in the next collective. The block must not contain a collective: a failure within a
        collective leaves the remaining ranks waiting until the launcher ends the ranks.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, after the others know
            failure = error
        told = None
        if failure is not None:
            unavailable = isinstance(failure, StoreUnavailable)
            told = [f"rank {self.rank} of {self.world_size}: {_line(failure)}", unavailable]
        others = [each for each in self.gather(told) if each is not None]
        if failure is not None:
            raise failure
        if others:
            kind = RankUnavailableError if all(unavailable for _, unavailable in others) else RankError
            raise kind("; ".join(message for message, _ in others))

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor)
        return gathered

    def _gang(self) -> _Gang:
        if self.gang is None:
            raise ValueError("world_size: value 1; allowed: 2 or more, started as ranks")
        return self.gang


@contextmanager
def joined(device: torch.device, folder: Path | None = None) -> Iterator[Ranks]:
    """Join the ranks of this process's launcher until the end of the block; without WORLD_SIZE the process is alone.

    An error that ends the block is logged with its rank, because a launcher reports the first failure that the launcher
    sees, often the complaint of a peer that misses this rank.

    Args:
        device: The kind of device; for "cuda", the GPU with the number LOCAL_RANK is taken.
        folder: The meeting folder of ranks on one machine (`file_store`); None: the environment of torchrun names the
            meeting point.

    Raises:
        RankError: On this machine, another process has connected in the place of a rank.
        ValueError: RANK, WORLD_SIZE or LOCAL_RANK is missing or out of range.
    """
    world_size = _number("WORLD_SIZE", 1, None) if "WORLD_SIZE" in os.environ else 1
    if world_size == 1:
        yield Ranks(device=device)
        return
    rank = _number("RANK", 0, world_size - 1)
    if folder is None:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=COLLECTIVE_TIMEOUT))
    else:
        store = file_store(folder, world_size, COLLECTIVE_TIMEOUT)
    position = Position(["cpu"] if device.type == "cpu" else ["cpu", device.type])
    # A connection of its own, because a store's connection serves one call at a time, and some last for hours.
    missed = MissedRanks(
        rank, world_size, position, PrefixStore("missed", store.clone()), COLLECTIVE_TIMEOUT.total_seconds()
    )
    try:
        with missed:
            position.arrive()
            ranks = _join(rank, world_size, device, store, position)
            if folder is not None:
                _check_peers(rank, world_size, store)
            yield ranks
            position.arrive()
            _leave(world_size, store)
    except BaseException as error:
        log.error("rank %d of %d failed: %s\n%s", rank, world_size, _line(error), traceback.format_exc())  # noqa: TRY400 - in one record
        raise


def _join(rank: int, world_size: int, device: torch.device, store: Store, position: Position) -> Ranks:
    backend = "gloo"
    if device.type == "cuda":
        local = _number("LOCAL_RANK", 0, torch.cuda.device_count() - 1)
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=PrefixStore("process_group", store),
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    mesh = init_device_mesh(device.type, (world_size,))
    return Ranks(rank, world_size, device, _Gang(mesh, PrefixStore("ranks", store), [0], [0], position))


def _check_peers(rank: int, world_size: int, store: Store) -> None:
    peer = impostor(rank, world_size, store)
    if peer is not None:
        raise RankError(f"rank {rank} of {world_size}: what has connected as rank {peer} is another process")


def _leave(world_size: int, store: Store) -> None:
    """Leave when every rank has arrived, because an early leaver would close connections that peers still use."""
    if store.add("leaving", 1) == world_size:
        store.set("left", "")
    store.wait(["left"], COLLECTIVE_TIMEOUT)
    dist.destroy_process_group()
    # Gloo's thread needs the interpreter to free the last collective's tensors. While the interpreter exits, the thread
    # cannot get it, and would abort the process after its work is done.
    time.sleep(LAST_TENSORS_S)


def _number(name: str, low: int, high: int | None) -> int:
    value = os.environ.get(name, "")
    allowed = f"{low} or more" if high is None else f"{low} to {high}"
    if not value.isdecimal() or int(value) < low or (high is not None and int(value) > high):
        raise ValueError(f"{name}: value {value!r} in the environment; allowed: {allowed}, as torchrun sets it")
    return int(value)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
