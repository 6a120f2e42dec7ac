"""Reading a set of tensors once for all ranks: each reads and verifies a share, and deals out its rows.

So the ranks together read no byte twice, and together hold the set once, not once each.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from storage.stores.store import ObjectStore
from storage.weights.tensor_sets import Manifest, TensorBlock, TensorEntry, names_by_object, stream
from tasks.learning.ranks import Ranks
from tasks.learning.sharded import OwnRows, Stored, Unread, own_rows
from tasks.sampling.engines.weight_tensors import DTYPES, as_torch

Read = Callable[[list[str]], dict[str, TensorBlock]]


def read_shared(ranks: Ranks, entries: Mapping[str, TensorEntry], read: Read) -> dict[str, Stored]:
    """All tensors of a manifest; of several ranks each gets its own rows, and scalars whole.

    Every rank must call it with the same entries. A digest is that of a whole tensor, so a tensor is read whole by one
    rank, which sends each other rank its rows. If one rank cannot read its share, all raise
    (`Ranks.failing_together`).

    Args:
        ranks: The processes that need the tensors.
        entries: By name, in the order of the manifest.
        read: Returns the tensors of these names, verified.

    Raises:
        ValueError: The dtype of a tensor is not one of DTYPES.
    """
    names = list(entries)
    if ranks.world_size == 1:
        return {name: as_torch(block) for name, block in read(names).items()}
    owners = owners_of([entries[name].num_bytes for name in names], ranks.world_size)
    with ranks.failing_together():
        own = read([name for name, owner in zip(names, owners, strict=True) if owner == ranks.rank])
    found: dict[str, Stored] = {}
    for name, owner in zip(names, owners, strict=True):
        # Not kept: what was dealt out is held by those who need it.
        tensor = as_torch(own.pop(name)) if owner == ranks.rank else None
        found[name] = _dealt(ranks, entries[name], tensor, owner)
    return found


def unread(store: ObjectStore, prefix: str, manifest: Manifest, ranks: Ranks) -> dict[str, Unread]:
    """The tensors of a manifest, in its order; reading begins now, and goes on as they are taken, best in this order.

    So they go straight to where they are needed, and a window of them is in host memory at a time. Of several ranks
    each reads every so many objects, and deals out their rows. What is taken out of order stays in memory meanwhile.
    """
    arrivals = _Arrivals(store, prefix, manifest, ranks)
    found = {}
    for name, entry in manifest.tensors.items():
        if entry.dtype not in DTYPES:
            raise ValueError(f"dtype: value {entry.dtype!r}; allowed: {', '.join(DTYPES)}")
        found[name] = Unread(entry.shape, DTYPES[entry.dtype], partial(arrivals.take, name))
    return found


class _Arrivals:
    """The objects of a set in their order: read by one rank each, and dealt out to all."""

    def __init__(self, store: ObjectStore, prefix: str, manifest: Manifest, ranks: Ranks) -> None:
        self._ranks, self._entries = ranks, manifest.tensors
        self._objects = names_by_object(manifest)
        self._stream = stream(store, prefix, manifest, self._objects[ranks.rank :: ranks.world_size])
        self._number = 0
        self._arrived: dict[str, torch.Tensor | OwnRows] = {}

    def take(self, name: str) -> torch.Tensor | OwnRows:
        while name not in self._arrived:
            self._next()
        return self._arrived.pop(name)

    def _next(self) -> None:
        """Take the next object; every rank calls it. If its rank cannot read it, all raise."""
        ranks, names, owner = self._ranks, self._objects[self._number], self._number % self._ranks.world_size
        with ranks.failing_together():
            blocks = next(self._stream) if owner == ranks.rank else {}
        for name in names:
            tensor = as_torch(blocks.pop(name)) if owner == ranks.rank else None
            if tensor is not None and ranks.world_size == 1:
                self._arrived[name] = tensor
            else:
                self._arrived[name] = _dealt(ranks, self._entries[name], tensor, owner)
        self._number += 1


def _dealt(ranks: Ranks, entry: TensorEntry, tensor: torch.Tensor | None, owner: int) -> torch.Tensor | OwnRows:
    """This rank's rows of a tensor that rank `owner` has. tensor: on the owner, the whole one."""
    if entry.dtype not in DTYPES:
        raise ValueError(f"dtype: value {entry.dtype!r}; allowed: {', '.join(DTYPES)}")
    dtype, world = DTYPES[entry.dtype], range(ranks.world_size)
    if not entry.shape:
        scalar = torch.empty((), dtype=dtype)
        ranks.deal([] if tensor is None else [tensor] * len(world), scalar, owner)
        return scalar
    parts = [own_rows(entry.shape[0], len(world), rank) for rank in world]
    mine = parts[ranks.rank]
    rows = torch.empty((mine.stop - mine.start, *entry.shape[1:]), dtype=dtype)
    ranks.deal([] if tensor is None else [tensor[part] for part in parts], rows, owner)
    return OwnRows(rows, entry.shape, ranks)


def owners_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that reads each tensor: consecutive ones, which often lie in one object, about equal bytes for each."""
    total, before, owners = max(1, sum(sizes)), 0, []
    for size in sizes:
        owners.append(min(ranks - 1, (before + size // 2) * ranks // total))
        before += size
    return owners
