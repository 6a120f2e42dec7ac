"""LiveBytes: the bytes of tensors that a block of code holds at once, on any device, counted operator by operator.

On a GPU torch counts them itself; this counts them where it does not, slowly.
"""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block in which `peak` becomes the most bytes at once of tensors that began to exist within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and _place(each) not in {*given, *self._live}:
                storage = each.untyped_storage()
                self._live[_place(each)] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, _place(each), None)
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the identity of memory that tensors share
