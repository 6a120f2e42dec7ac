"""Steady positions: the length up to which a model rotates positions by the same frequencies.

Some rotary embeddings (longrope, dynamic scaling) change their frequencies at some length. Beyond that length a token's
logits depend on later tokens, and in a batch on the other responses: the keys in a cache were rotated for a shorter
sequence, and the trainer rotates all keys for the longest sequence. So a run must not be able to reach such a length.
"""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_FREQUENCIES = "inv_freq"


def unsteady(model: Any, context_length: int) -> str | None:
    """Why sequences of up to `context_length` tokens do not have one way to rotate positions; None if they do.

    Only the rotary embeddings of the model are called, and stay unchanged; for a model on the meta device, new
    embeddings of equal classes are built and called.
    """
    steady = steady_length(model, context_length)
    if steady >= context_length:
        return None
    return (
        f"rollout.context_length: value {context_length}; allowed: up to {steady}, because "
        f"{type(model).__name__} rotates positions by other frequencies in longer sequences (rope_parameters in its "
        "config.json)"
    )


def steady_length(model: Any, context_length: int) -> int:
    """The most tokens of a sequence, up to `context_length`, with which each position is rotated as in a short one."""
    steady = context_length
    for rotary in _rotary_embeddings(model):
        for layer_type in _layer_types(rotary):
            steady = _steady_length(rotary, layer_type, steady)
    return steady


def _rotary_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if any(_FREQUENCIES in name for name in vars(module) | module._buffers):  # noqa: SLF001 - not those of children
            is_meta = any(buffer.is_meta for buffer in module.buffers(recurse=False))
            yield type(module)(module.config) if is_meta else module


def _layer_types(rotary: Any) -> list[str | None]:
    """The kinds of layers with frequencies of their own; [None] if the frequencies do not depend on the layer."""
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return [None]
    return sorted(set(rotary.config.layer_types))


def _steady_length(rotary: nn.Module, layer_type: str | None, longest: int) -> int:
    """Find the length by bisection, because frequencies change at one length or never."""
    least, most = 2, longest
    short = _rotations(rotary, layer_type, least)
    if torch.equal(short, _rotations(rotary, layer_type, most)):
        return most
    while most - least > 1:
        middle = (least + most) // 2
        if torch.equal(short, _rotations(rotary, layer_type, middle)):
            least = middle
        else:
            most = middle
    return least


def _rotations(rotary: nn.Module, layer_type: str | None, length: int) -> Tensor:
    """How the first two positions are rotated in a sequence of `length` tokens."""
    # Some keep the frequencies of the longest sequence that they have seen.
    fresh = copy.deepcopy(rotary)
    device = next((buffer.device for buffer in fresh.buffers()), torch.device("cpu"))
    positions = torch.tensor([[0, 1, length - 1]], device=device)
    given = (torch.zeros(1, 3, 1, device=device), positions)
    with torch.no_grad():
        found = fresh(*given) if layer_type is None else fresh(*given, layer_type=layer_type)
    parts = found if isinstance(found, tuple) else (found,)
    return torch.cat([part[..., :2, :].flatten() for part in parts])
