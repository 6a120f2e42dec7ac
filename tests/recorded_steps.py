"""A recording of a step on a CPU, which is as strict as a CUDA graph.

It keeps operations with the tensors that they read and wrote, and runs them again on these. So what was a number of
Python's when it was recorded stays, a tensor that has since been replaced is read as it was, and whatever would make
Python wait for a device, or bring a number from Python to a device, cannot be recorded.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tasks.sampling.engines.step_graphs import Launch

# In inference mode `item` is not divided into the operation below it.
WAITS = ("item", "_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "equal", "is_nonzero")
FROM_THE_HOST = ("lift_fresh",)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Operations(TorchDispatchMode):
    """Notes the operations that run within it, and what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, found))
        return found

    def named(self, *names: str) -> list[str]:
        """Those of these names, in order."""
        return [name for call in self.calls if (name := call[0].overloadpacket.__name__) in names]


class _Recording(Operations):
    """Puts back what an operation writes, when it ends: recording runs nothing on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}
        self._kept: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if name in WAITS + FROM_THE_HOST:
            raise RuntimeError(f"operation {name} is not permitted when a stream is capturing")
        given = dict(zip((one.name for one in operator._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in operator._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensor = given[argument.name]
                self._before.setdefault(_storage(tensor), (tensor, tensor.untyped_storage().clone()))
        found = super().__torch_dispatch__(operator, types, args, kwargs)
        given = {_storage(one) for one in tree_leaves((args, kwargs or {})) if isinstance(one, Tensor)}
        new = [one for one in tree_leaves(found) if isinstance(one, Tensor) and _storage(one) not in given]
        if new or operator._schema.is_mutable:  # else a view, which sees what its tensor holds
            self._kept.append((operator, args, kwargs or {}, new))
        return found

    def restore(self) -> None:
        for tensor, storage in self._before.values():
            tensor.untyped_storage().copy_(storage)

    def run(self) -> None:
        for operator, args, kwargs, written in self._kept:
            again = operator(*args, **kwargs)
            for old, new in zip(written, tree_leaves(again), strict=False):
                old.copy_(new)


class Recorder:
    """`Record`, which counts its recordings and their launches."""

    def __init__(self) -> None:
        self.recorded = self.launched = 0
        self.pools: list[object] = []

    def __call__(self, step: Launch, pool: object) -> tuple[Launch, object]:
        recording = _Recording()
        try:
            with recording:
                found = step()
        finally:
            recording.restore()
        self.recorded += 1
        self.pools.append(pool)

        def launch() -> Tensor:
            self.launched += 1
            recording.run()
            return found

        return launch, pool or object()
