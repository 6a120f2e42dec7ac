"""Reading a set of tensors once for all ranks: each rank reads and verifies a share, and deals out the rows.

No byte is read twice, and the set is in memory once, divided among the ranks, not once per rank.
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
    """Read the tensors of a manifest; with several ranks, each rank gets its own rows, and scalars whole.

    Every rank must call `read_shared` with equal entries. A digest covers a whole tensor, so a single rank reads the
    tensor whole and sends each rank its rows. If a rank cannot read its share, every rank raises
    (`Ranks.failing_together`).

    Args:
        ranks: The processes that need the tensors.
        entries: By name, in the order of the manifest.
        read: Returns verified tensors by name.

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
    """Open the tensors of a manifest, in order; reading begins now and continues as tensors are taken, best in order.

    Tensors go straight to their destination, and host memory holds only a window of tensors. With several ranks, rank i
    of n reads every n-th object from object i on, and deals out the rows. Tensors that are passed over wait in memory.
    """
    arrivals = _Arrivals(store, prefix, manifest, ranks)
    found = {}
    for name, entry in manifest.tensors.items():
        if entry.dtype not in DTYPES:
            raise ValueError(f"dtype: value {entry.dtype!r}; allowed: {', '.join(DTYPES)}")
        found[name] = Unread(entry.shape, DTYPES[entry.dtype], partial(arrivals.take, name))
    return found


class _Arrivals:
    """The objects of a set in order, each read by a single rank and dealt out to all ranks."""

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
        """Take the next object; a collective. If the object's rank cannot read the object, every rank raises."""
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
    """This rank's rows of a tensor read by rank `owner`. tensor: the whole tensor on the owner, None elsewhere."""
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
    """The rank that reads each tensor: consecutive tensors, often of one object, with about equal bytes per rank."""
    total, before, owners = max(1, sum(sizes)), 0, []
    for size in sizes:
        owners.append(min(ranks - 1, (before + size // 2) * ranks // total))
        before += size
    return owners
