"""Reading a set of tensors once for all ranks: each reads and verifies a share, and deals out its rows.

So the ranks together read no byte twice, and together hold the set once, not once each.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from storage.weights.tensor_sets import TensorBlock, TensorEntry
from tasks.learning.ranks import Ranks
from tasks.learning.sharded import OwnRows, Stored, own_rows
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


def _dealt(ranks: Ranks, entry: TensorEntry, tensor: torch.Tensor | None, owner: int) -> Stored:
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
