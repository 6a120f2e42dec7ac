"""Patches of weights inside a worker of vLLM: the models that take patches, the writing, and a check of the result.

vLLM writes a patch in the coordinates of the checkpoint through the model's own loader, so fused parameters and the
shards of several GPUs are its business. It writes in place: a patch that fails leaves two versions mixed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tasks.sampling.engines.vllm_names import resolve

# How vLLM names the layers whose parameters it leaves as they are loaded.
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_LATENT = "MLA"
INDICES, VALUES = ".indices", ".values"


def why_whole(model: nn.Module) -> str | None:
    """Why weights cannot be patched in this model of vLLM; None if nothing is known against it."""
    if hasattr(model, "process_weights_after_loading"):
        return f"{type(model).__name__} computes from its weights after it has loaded them"
    for module in model.modules():
        name, method = type(module).__name__, type(getattr(module, "quant_method", None)).__name__
        if method not in ("NoneType", *_PLAIN):
            return f"vLLM rearranges the weights of {name} ({method})"
        if _LATENT in name:
            return f"vLLM keeps products of the weights of {name}"
    if any(not parameter.numel() for parameter in model.parameters()):
        return "vLLM's CPU build packs the weights"
    return None


def patch(
    model: nn.Module, shapes: Mapping[str, list[int]], given: Iterator[tuple[str, Tensor]], device: torch.device
) -> None:
    """Change elements in place. given: for each tensor of `shapes`, its indices and values, under its name and an end.

    Raises what vLLM raises, for instance for a NaN or a loader that does more than copy; it leaves undefined weights.
    """
    parts = {name: tensor.to(device) for name, tensor in given}
    patches = [
        resolve("CheckpointWeightPatch")(
            name=name,
            shape=tuple(shape),
            dtype=parts[name + VALUES].dtype,
            values=parts[name + VALUES],
            indices=parts[name + INDICES],
        )
        for name, shape in shapes.items()
    ]
    # Indices ascend, so that none is there twice.
    resolve("load_checkpoint_weight_patches")(model, patches, validate_unique_indices=False)
    if device.type != "cpu":
        torch.accelerator.synchronize()


def digests(model: nn.Module) -> dict[str, Any]:
    """Digests by the name of a tensor: hashes of rows and columns, computed on the device of the weights."""
    named = {
        name: tensor.detach() for part in (model.named_parameters(), model.named_buffers()) for name, tensor in part
    }
    return {name: _digest(tensor) for name, tensor in named.items()}


def _digest(tensor: Tensor) -> Any:
    if tensor.ndim < 2:
        return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    # Elements that change places within a row do not change its hash, but that of their columns.
    return [torch.hash_tensor(tensor, dim=dim).cpu().numpy().tobytes() for dim in (0, -1)]
