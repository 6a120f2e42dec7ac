"""ComputeCopy: parameters that passes use in half precision, beside float32 masters that the optimizer updates.

A layer whose weights are in half precision passes on activations in half precision, which are half as many bytes to
read and write. Each pass's gradient is added to the master's in float32. FSDP2 does the same for several ranks
(`tasks.learning.sharded`).
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from tasks.learning.sharded import Relocate


class ComputeCopy:
    """Gives a module parameters of another dtype; the module's float32 parameters become the masters.

    Before each pass of `root`, the copies take the masters' values. After a backward pass, copies have no gradient;
    masters have the sum of all gradients since the last drop.

    Args:
        root: The module whose `forward` alone reads the parameters; their values may be loaded later.
        dtype: The dtype of the copies.
        uncopied: Modules within `root` that keep their parameters.
    """

    def __init__(self, root: nn.Module, dtype: torch.dtype, uncopied: Collection[nn.Module] = ()) -> None:
        kept = {parameter for module in uncopied for parameter in module.parameters()}
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for module in root.modules():
            for name, master in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                # What is in the dtype already is not trained, and needs no master.
                if master in kept or master.dtype == dtype:
                    continue
                # A tied parameter has one copy.
                if master not in copies:
                    copies[master] = _copy(master, dtype)
                module.register_parameter(name, copies[master])
        self._masters = {copy: master for master, copy in copies.items()}
        root.register_forward_pre_hook(self._refresh)

    def master(self, parameter: nn.Parameter) -> nn.Parameter:
        """The master of a parameter of the module; the parameter itself if it has none."""
        return self._masters.get(parameter, parameter)

    def relocate(self, to: Relocate) -> None:
        """Replace the masters' memory by what `to` returns, and free that of the copies until the next pass."""
        for copy, master in self._masters.items():
            copy.data = copy.data.new_empty(0)
            master.data = to(master.data)

    @torch.no_grad()
    def _refresh(self, _root: nn.Module, _arguments: Any) -> None:
        for copy, master in self._masters.items():
            if copy.shape != master.shape:
                copy.data = torch.empty_like(master, dtype=copy.dtype)
        torch._foreach_copy_(list(self._masters), list(self._masters.values()))


def _copy(master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
    if copy.requires_grad:
        # A hook that named the copy would keep both for ever: Python's collector does not see hooks of a tensor.
        copy.register_post_accumulate_grad_hook(partial(_hand_over, master))  # type: ignore[no-untyped-call]
    return copy


def _hand_over(master: nn.Parameter, copy: nn.Parameter) -> None:
    """Add the gradient of a copy to its master's, and drop it."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None, "called after a gradient was accumulated"
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad += gradient
