"""Reading a set of tensors once for all ranks: each rank reads its share, and sends it to the others."""

from collections.abc import Callable, Mapping, Sequence

from storage.weights.tensor_sets import TensorBlock, TensorEntry
from tasks.learning.ranks import Ranks
from tasks.sampling.engines.weight_tensors import as_torch

Read = Callable[[list[str]], dict[str, TensorBlock]]


def read_shared(ranks: Ranks, entries: Mapping[str, TensorEntry], read: Read) -> dict[str, TensorBlock]:
    """All tensors of a manifest, on every rank; every rank must call it with the same entries.

    Each tensor is read from the store by one rank, so the ranks together read no byte twice. If one rank cannot read
    its share, all raise (`Ranks.failing_together`).

    Args:
        ranks: The processes that need the tensors.
        entries: By name, in the order of the manifest.
        read: Returns the tensors of these names, verified.
    """
    names = list(entries)
    if ranks.world_size == 1:
        return read(names)
    owners = owners_of([entries[name].num_bytes for name in names], ranks.world_size)
    with ranks.failing_together():
        own = read([name for name, owner in zip(names, owners, strict=True) if owner == ranks.rank])
    found = {}
    for name, owner in zip(names, owners, strict=True):
        found[name] = own[name] if owner == ranks.rank else _empty(entries[name])
        # As bytes, because not every dtype can be sent.
        ranks.send_all(as_torch(TensorBlock("U8", (found[name].num_bytes,), found[name].data)), owner)
    return found


def _empty(entry: TensorEntry) -> TensorBlock:
    """Writable memory for a tensor."""
    return TensorBlock(entry.dtype, entry.shape, memoryview(bytearray(entry.num_bytes)))


def owners_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that reads each tensor: consecutive ones, which often lie in one object, about equal bytes for each."""
    total, before, owners = max(1, sum(sizes)), 0, []
    for size in sizes:
        owners.append(min(ranks - 1, (before + size // 2) * ranks // total))
        before += size
    return owners
