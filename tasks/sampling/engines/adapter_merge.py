"""Merging: the weights of layers with LoRA adapters, W + alpha / rank * B A. The one place that adds them.

The trainer merges the layers of a full version, and a reader the layers of a version published as an adapter, by equal
operations in equal order. On one machine both get the same bits; elsewhere the product B A may differ in its last bits,
like every product.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from storage.weights.adapters import WEIGHT, Adapter
from storage.weights.tensor_sets import TensorBlock
from tasks.sampling.engines.weight_tensors import as_block, as_torch


def merged_weight(weight: Tensor, first: Tensor, second: Tensor, scale: float, *, transposed: bool) -> Tensor:
    """The weight with its difference, float32, on the device of the factors A [rank, inputs] and B [outputs, rank].

    First the product B A, then the product with the scale, then the sum, each rounded to float32.

    Args:
        weight: [outputs, inputs], or [inputs, outputs] if `transposed`; any floating dtype.
        first: A. Any floating dtype, as is `second`, B.
        second: B.
        scale: alpha / rank.
        transposed: whether the layer holds its weight as [inputs, outputs].
    """
    difference = (second.float() @ first.float()).mul_(scale)
    return weight.float() + (difference.T if transposed else difference)


@torch.inference_mode()
def merged_blocks(base: Mapping[str, TensorBlock], adapter: Adapter) -> dict[str, TensorBlock]:
    """All tensors of a model: those of `base`, and of each adapted layer the merged weight in the dtype of its own."""
    merged = dict(base)
    scale = adapter.record.alpha / adapter.record.rank
    for layer, (first, second) in adapter.layers.items():
        weight = as_torch(base[layer + WEIGHT])
        transposed = layer in adapter.record.transposed
        value = merged_weight(weight, as_torch(first), as_torch(second), scale, transposed=transposed)
        merged[layer + WEIGHT] = as_block(value.to(weight.dtype))
    return merged
