"""Sharding: a module whose parameters lie in equal parts on several ranks, gathered layer by layer when needed (FSDP2).

Parameters, gradients and moments are then DTensors, sharded along their first dimension. Owns how a whole tensor
becomes shards and back; does not know names of tensors, losses or storage. On one rank nothing here changes anything.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_parameter_registration_hook

from tasks.learning.ranks import Ranks


@contextmanager
def skeleton(ranks: Ranks) -> Iterator[None]:
    """Modules made inside have their buffers on the rank's device, and on one rank their parameters, too.

    On several, parameters have no memory before `shard` gives them a part of it: no rank ever holds the whole model.
    """
    if ranks.world_size == 1:
        with torch.device(ranks.device):
            yield
        return
    hook = register_module_parameter_registration_hook(cast("Any", _without_memory))
    try:
        with torch.device(ranks.device):
            yield
    finally:
        hook.remove()


def shard(root: nn.Module, ranks: Ranks, compute_dtype: torch.dtype | None) -> None:
    """Divide the parameters of a `skeleton` among ranks, in place; their values are still to be loaded.

    Each element of the root's outermost lists (a decoder's layers) is gathered as one, and the rest with the root,
    whose `forward` must be what reads it. Gradients are summed over ranks in float32, never averaged: the denominator
    of a step is applied once. With `compute_dtype`, the parameters of layers are cast before they are gathered. What is
    between layers stays float32, as with autocast on one rank, and so does what the root gathers: embeddings and head.
    """
    trainable = any(parameter.requires_grad for parameter in root.parameters())
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    cast = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in _layers(root):
        fully_shard(layer, mesh=ranks.mesh, mp_policy=cast)
    fully_shard(root, mesh=ranks.mesh, mp_policy=whole, reshard_after_forward=None if trainable else True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
    root.to_empty(device=ranks.device)
    for name, buffer in root.named_buffers():
        buffer.copy_(buffers[name])
    root.register_forward_hook(_reshard_without_backward)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on its device. A collective for a sharded one: every rank must call it, and gets it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_whole(target: Tensor, values: Tensor) -> None:
    """Copy whole `values`, of the target's global shape, into a tensor: of a sharded one, into this rank's part.

    No communication; only the part is moved to the target's device.
    """
    if not isinstance(target, DTensor):
        target.copy_(values)
        return
    if target.placements != (Shard(0),):
        raise ValueError(f"placements: value {target.placements}; allowed: {(Shard(0),)}")
    local = target.to_local()
    rows = -(-values.shape[0] // target.device_mesh.size())
    start = min(rows * target.device_mesh.get_local_rank(), values.shape[0])
    local.copy_(values[start : start + local.shape[0]])


def add_nothing(scores: Tensor) -> None:
    """Take part in a backward pass of all ranks with a gradient of zero: `scores` are an idle batch's."""
    (scores.sum() * 0.0).backward()  # type: ignore[no-untyped-call]


def _without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:
        return None  # As it is; another object would untie tied parameters.
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def _reshard_without_backward(root: Any, _args: Any, _output: Any) -> None:
    # Only a backward pass would; until then the module's parameters would not be the ones the optimizer updates.
    if not torch.is_grad_enabled():
        root.reshard()
