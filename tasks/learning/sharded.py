"""Sharding (FSDP2): each of several ranks holds an equal part of a module's parameters and gathers layers when needed.

Parameters, gradients and moments are then DTensors, sharded along their first dimension. This module converts whole
tensors to shards and back. With one rank it changes nothing.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_parameter_registration_hook

from tasks.learning.ranks import Ranks


@contextmanager
def skeleton(ranks: Ranks, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Create modules within the block: buffers, and with one rank parameters, are on the rank's device.

    With several ranks, parameters have no memory until `shard`, so that no rank ever holds the whole model. With one
    rank and a `dtype`, each parameter is converted to `dtype` on creation, so the model never exists in float32.
    """
    if ranks.world_size == 1 and dtype is None:
        with torch.device(ranks.device):
            yield
        return
    made = partial(_in_dtype, dtype) if dtype is not None and ranks.world_size == 1 else _without_memory
    hook = register_module_parameter_registration_hook(cast("Any", made))
    try:
        with torch.device(ranks.device):
            yield
    finally:
        hook.remove()


def shard(
    root: nn.Module, ranks: Ranks, compute_dtype: torch.dtype | None, uncopied: Collection[nn.Module] = ()
) -> None:
    """Divide the parameters of a `skeleton` among ranks, in place; their values must be loaded afterwards.

    Each element of the root's outermost lists (a decoder's layers) is gathered as one unit, the remaining parameters
    with the root; only the root's `forward` may read parameters. Gradients are summed over ranks in float32, never
    averaged, because the denominator of a step is applied once. With `compute_dtype`, parameters are cast before
    gathering, except in the modules `uncopied`.
    """
    trainable = any(parameter.requires_grad for parameter in root.parameters())
    uncast = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    cast = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in uncopied:
        fully_shard(module, mesh=ranks.mesh, mp_policy=uncast)
    for layer in layers(root):
        fully_shard(layer, mesh=ranks.mesh, mp_policy=cast)
    fully_shard(root, mesh=ranks.mesh, mp_policy=cast, reshard_after_forward=None if trainable else True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
    root.to_empty(device=ranks.device)
    for name, buffer in root.named_buffers():
        buffer.copy_(buffers[name])
    root.register_forward_hook(_reshard_without_backward)


@dataclass(frozen=True)
class OwnRows:
    """This rank's rows of a stored tensor, matching the rank's shard of the parameter.

    Attributes:
        rows: The rows, on the CPU.
        shape: The shape of the whole tensor.
        ranks: The ranks that hold the rows together.
    """

    rows: Tensor
    shape: tuple[int, ...]
    ranks: Ranks

    @property
    def nbytes(self) -> int:
        """The bytes that this rank holds."""
        return self.rows.nbytes

    def whole(self) -> Tensor:
        """The whole tensor, on every rank; a collective."""
        found, ranks = torch.empty(self.shape, dtype=self.rows.dtype), self.ranks
        for owner in range(ranks.world_size):
            rows = own_rows(self.shape[0], ranks.world_size, owner)
            ranks.deal([self.rows] * ranks.world_size, found[rows], owner)
        return found


@dataclass(frozen=True)
class Unread:
    """A stored tensor that is read once, when needed.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: The stored dtype.
        read: Returns the tensor, or this rank's rows. With several ranks a collective: every rank reads equal tensors
            in equal order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor | OwnRows]

    @property
    def nbytes(self) -> int:
        """The bytes that this rank holds."""
        return 0


# A tensor from the store on one rank, or on several, or one that is still there.
Stored = Tensor | OwnRows | Unread
# Returns a tensor of the same values, or of the same shard of them, in other memory.
Relocate = Callable[[Tensor], Tensor]


def own_rows(rows: int, world_size: int, rank: int) -> slice:
    """The rows of a tensor that rank `rank` holds: equal shares, but the last ranks may have fewer rows or none."""
    each = -(-rows // world_size)
    return slice(min(each * rank, rows), min(each * (rank + 1), rows))


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the shard of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on its device. For a sharded tensor, `whole` is a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_sharded(part: Tensor, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Make a sharded tensor of `shape` from this rank's rows `part`, divided as `like`; `part` if `like` is whole.

    Without communication; the memory is shared unless `part` is not on the device of `like`.
    """
    if not isinstance(like, DTensor):
        return part
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def part_of(values: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of whole `values` under the division of `like`, as a view; `values` if `like` is whole."""
    if not isinstance(like, DTensor):
        return values
    if like.placements != (Shard(0),):
        raise ValueError(f"placements: value {like.placements}; allowed: {(Shard(0),)}")
    return values[own_rows(values.shape[0], like.device_mesh.size(), like.device_mesh.get_local_rank())]


def copy_stored(target: Tensor, values: Stored, like: Tensor | None = None) -> None:
    """Copy `values` of the target's global shape into the target; into a sharded one, only this rank's part.

    Only the part moves to the target's device. Ranks communicate only if the target is whole on every rank and `values`
    are rows; then every rank must call `copy_stored`. `like`: a tensor with the division of the values, if `target` is
    this rank's part.
    """
    if isinstance(values, Unread):
        values = values.read()
    like = target if like is None else like
    if isinstance(values, OwnRows) and isinstance(like, DTensor):
        own_part(target).copy_(values.rows)
    else:
        own_part(target).copy_(part_of(whole_stored(values), like))


def whole_stored(values: Stored) -> Tensor:
    """The whole tensor; for rows, `whole_stored` is a collective."""
    if isinstance(values, Unread):
        values = values.read()
    return values.whole() if isinstance(values, OwnRows) else values


def header(values: Stored) -> Tensor:
    """The shape and dtype of the whole tensor, on the device meta."""
    rows = values.rows if isinstance(values, OwnRows) else values
    return torch.empty(tuple(values.shape), dtype=rows.dtype, device="meta")


def break_off(root: nn.Module) -> None:
    """Prepare a module for the next pass after a pass that raised on every rank; the failed pass's gradient is lost."""
    if not isinstance(root, FSDPModule):
        return
    root.reset_iter_state()
    # torch leaves there what layers had found of their gradients, and would add it to the next pass's.
    for state in root._get_fsdp_state()._state_ctx.all_states:  # noqa: SLF001 - no public names
        for group in state._fsdp_param_groups:  # noqa: SLF001
            for held in group.fsdp_params:
                held.unsharded_accumulated_grad = None
                if hasattr(held, "_unsharded_param"):
                    held._unsharded_param.grad = None  # noqa: SLF001


def add_nothing(scores: Tensor) -> None:
    """Take part in the ranks' backward pass with a gradient of zero; `scores` belong to an idle batch."""
    (scores.sum() * 0.0).backward()  # type: ignore[no-untyped-call]


def _without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:
        return None  # None keeps the parameter; another object would untie tied parameters.
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)


def _in_dtype(
    dtype: torch.dtype, _module: nn.Module, _name: str, parameter: nn.Parameter | None
) -> nn.Parameter | None:
    if parameter is None or parameter.dtype == dtype or not parameter.is_floating_point():
        return None
    return nn.Parameter(parameter.data.to(dtype), requires_grad=parameter.requires_grad)


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of a module's outermost lists: the layers of a decoder."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from layers(child)


def _reshard_without_backward(root: Any, _args: Any, _output: Any) -> None:
    # Otherwise only a backward pass would reshard, and until then the module's parameters would not be those that the
    # optimizer updates.
    if not torch.is_grad_enabled():
        root.reshard()
