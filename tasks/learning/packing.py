"""Packing: a pass is a row with the responses end to end, without padding, and with shared prompts once.

The attention is a function that transformers calls in a model's layers: variable-length flash attention on a GPU, and a
product for each response elsewhere; a response attends only to its prompt and itself. This module also tries whether a
packed model gives equal log-probs.
"""

import logging
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own custom

from storage.errors import WrongInputError
from tasks.learning.batching import TokenBatch
from tasks.learning.equal_passes import Pass, change_if_equal
from tasks.learning.packed_row import Repeats, repeated
from tasks.learning.ranks import Ranks

log = logging.getLogger("gleaner")

# The name of the attention function in a transformers configuration.
PACKED = "gleaner_packed"
# What some models ask of an attention function besides: caps, sinks and biases, which it does not compute.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")
# How far a log-prob may move with the tokens of another response. As the kernels see the same sizes, it does not move.
_INFLUENCE_MAX = 1e-3


class NotPackedError(WrongInputError):
    """A model's layers need an attention that packing does not compute."""


def pack(model: Any) -> None:
    """Let a Hugging Face model's layers attend within responses; its passes must then be packed."""
    from transformers import AttentionInterface  # noqa: PLC0415 - costs seconds

    # A function without masks of its own gets none. Others get masks of the size of a row squared.
    AttentionInterface.register(PACKED, _attention)
    model.set_attn_implementation(PACKED)
    if not is_packed(model):
        raise NotPackedError(f"{type(model).__name__} has an attention of its own")


def leave_attention_uncompiled() -> None:
    """Let compiled layers call the packed attention uncompiled: a kernel on a GPU, a Python loop on a CPU."""
    from transformers import AttentionInterface  # noqa: PLC0415 - costs seconds

    AttentionInterface.register(PACKED, torch.compiler.disable(_attention))  # type: ignore[no-untyped-call]


def is_packed(model: Any) -> bool:
    """Whether `pack` was called for a model."""
    return bool(model.config._attn_implementation == PACKED)  # noqa: SLF001 - no public name


def pack_if_equal(model: Any, logprobs: Pass, batch: TokenBatch, ranks: Ranks | None = None) -> bool:
    """Pack a model if log-probs then stay equal on every rank; otherwise undo and log the reason.

    Args:
        model: A Hugging Face model.
        logprobs: A pass of the model as it is.
        batch: Two responses or more of different lengths; the first is the longest.
        ranks: The ranks that must make equally many passes, and so decide together; default: this process alone.

    Returns:
        Whether the model is packed.
    """
    before = model.config._attn_implementation  # noqa: SLF001

    def further(packed: Tensor) -> str | None:
        moved = _influence(packed, logprobs, batch)
        return None if moved <= _INFLUENCE_MAX else f"its log-probs move by {moved:.3g} with another response's tokens"

    reason = change_if_equal(
        lambda: pack(model), lambda: model.set_attn_implementation(before), logprobs, batch, ranks, further
    )
    if reason is not None:
        log.info("passes of %s are padded: %s", type(model).__name__, reason)
    return reason is None


def _influence(packed: Tensor, logprobs: Pass, batch: TokenBatch) -> float:
    """The largest change of a log-prob of later responses when the first response gets different tokens.

    A recurrent layer or a convolution carries a state from one response of a row to the next.
    """
    other = batch.input_ids.clone()
    # The others may share its prompt.
    start = batch.prompt_lengths[0]
    other[0, start:] = other[0, start:].flip(0)
    return float((logprobs(replace(batch, input_ids=other)).detach() - packed)[1:].abs().max())


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    repeats: Repeats | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row of N tokens, whose keys may begin with those of a shared prompt.

    Args:
        module: The layer.
        query: [1, heads, N, D].
        key: [1, key heads, N, D], of which each serves as many heads.
        value: As `key`.
        attention_mask: None.
        scaling: The factor of the products; None for D ** -0.5.
        sliding_window: The most tokens that a token attends to, itself included; None for no limit.
        cu_seq_lens_q: [S + 1] int32, where each sequence begins, and N.
        cu_seq_lens_k: [S + 1] int32, where the keys of each sequence begin after `repeats`, and M.
        max_length_q: The tokens of the longest sequence.
        max_length_k: The most keys of a sequence.
        repeats: The repeated keys of shared prompts; None without shared prompts.
        others: Further arguments of transformers.

    Returns:
        [1, N, heads, D], and None in place of the attention's weights.

    Raises:
        NotPackedError: The layer's attention has features that packing does not compute.
    """
    asked = [name for name in _UNKNOWN if others.get(name) is not None]
    if sliding_window is None and _configured_window(module) is not None:
        # Longer than the responses with which packing is tried, it would go unnoticed.
        asked.append("a window that only a mask tells")
    if asked or attention_mask is not None or not getattr(module, "is_causal", True):
        raise NotPackedError(f"{type(module).__name__} has {', '.join(asked) or 'a mask of its own'}")
    if repeats is not None:
        key, value = repeated(key, repeats), repeated(value, repeats)
    bounds, most = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
    if query.device.type == "cuda":
        return _on_gpu(query, key, value, scaling, sliding_window, bounds, most), None
    grouped = query.shape[1] != key.shape[1]
    parts = []
    for (start, end), (key_start, key_end) in zip(*(pairwise(each.tolist()) for each in bounds), strict=True):
        q, k, v = query[:, :, start:end], key[:, :, key_start:key_end], value[:, :, key_start:key_end]
        own, keys = end - start, key_end - key_start
        is_whole = own == keys and (sliding_window is None or sliding_window >= keys)
        mask = None if is_whole else _mask(own, keys, sliding_window)
        parts.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_whole, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _configured_window(module: Any) -> int | None:
    """The sliding window of a layer by the model's configuration, in tokens; None for no limit."""
    config = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or kinds[module.layer_idx] == "sliding_attention" else None


def _on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    bounds: tuple[Tensor, Tensor],
    most: tuple[int, int],
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - registers operators of CUDA

    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    before = -1 if sliding_window is None else sliding_window - 1
    grouped = q.shape[1] != k.shape[1]
    # The last query of a sequence meets its last key, so that queries have the keys of a shared prompt before them.
    found = varlen_attn(q, k, v, *bounds, *most, scale=scaling, window_size=(before, 0), enable_gqa=grouped)
    assert isinstance(found, Tensor), "no auxiliary result was asked for"
    return found[None]


def _mask(queries: int, keys: int, window: int | None) -> Tensor:
    """[queries, keys] bool: which keys the last tokens of a sequence attend to."""
    found = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return found if window is None else found.triu(keys - queries + 1 - window)
