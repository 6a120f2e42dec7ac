"""PatchedWeights: a weight version for engines that hold a base version and overwrite only the changed elements."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.weights.tensor_sets import ITEM_BYTES, TensorBlock

_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class Patch:
    """New elements of one tensor.

    Attributes:
        shape: the shape of the tensor.
        indices: I32 or I64 [n], flat and ascending.
        values: [n], of the tensor's dtype.
    """

    shape: tuple[int, ...]
    indices: TensorBlock
    values: TensorBlock


class PatchedWeights(Mapping[str, TensorBlock]):
    """All tensors of a weight version. An engine that holds version `base` may take only the changed elements.

    `read_places` gives the elements that differ, tensor by tensor, or None if they cannot be known.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorBlock],
        base: int,
        read_places: Callable[[], Mapping[str, NDArray[np.int64]] | None],
    ) -> None:
        self.base = base
        self._tensors = tensors
        self._read_places = read_places

    def patches(self) -> dict[str, Patch] | None:
        """The changed tensors; what reading raises, this raises."""
        places = self._read_places()
        return None if places is None else {name: _patch(self._tensors[name], at) for name, at in places.items()}

    def __getitem__(self, name: str) -> TensorBlock:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _patch(block: TensorBlock, places: NDArray[np.int64]) -> Patch:
    words = np.frombuffer(block.data, f"<u{ITEM_BYTES[block.dtype]}")
    kind, dtype = ("I32", "<i4") if len(words) <= _INT32_MAX else ("I64", "<i8")
    shape = (len(places),)
    return Patch(
        block.shape,
        TensorBlock(kind, shape, places.astype(dtype).data),
        TensorBlock(block.dtype, shape, words[places].data),
    )
