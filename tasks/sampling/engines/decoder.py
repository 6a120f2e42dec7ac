"""Decoder: a model's forward pass over the key-value cache, and the choice of a decoder for a model directory.

There are two: `fused_decoder` for the plain Llama shape (Llama, Mistral, Qwen2, Qwen3), and `hf_decoder`, which runs
the model's own code and so serves the rest. This module refuses models that the cache cannot serve.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from storage.weights.tensor_sets import TensorBlock
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.kv_cache import KeyValueCache, Window
from tasks.sampling.engines.weight_tensors import as_torch

_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


class Parameters(Protocol):
    """The names of a model's parameters."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every parameter by its Hugging Face name; a tied parameter has one name here."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """The other names of tied parameters, each with its name in `shapes`."""
        ...


class Decoder(Parameters, Protocol):
    """A model, which has no weights until `load`."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all parameters; names and shapes are those of `shapes`, and dtypes may differ."""
        ...

    def prefill(self, token_ids: Tensor, window: Window, cache: KeyValueCache) -> None:
        """Compute the keys and values of token_ids (int64 [n, T])."""
        ...

    def logits(self, token_ids: Tensor, window: Window, cache: KeyValueCache) -> Tensor:
        """Feed one token per row (int64 [n, 1]) and return the logits [n, V] of the next."""
        ...


def model_config(model_dir: Path | str) -> Any:
    """The Hugging Face configuration of a model directory; EngineError if there is none or it cannot be read."""
    from transformers import AutoConfig  # noqa: PLC0415 - seconds to import, and not needed to import the engine

    if not (Path(model_dir) / "config.json").is_file():
        raise EngineError(f"model_dir: no config.json in {str(model_dir)!r}")
    try:
        return AutoConfig.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise EngineError(f"model_dir: cannot read {str(model_dir)!r}: {reason}") from error


def read_config(model_dir: Path | str, context_length: int) -> Any:
    """Return `model_config` if our cache can serve such a model; raise EngineError otherwise."""
    config = model_config(model_dir)
    _check_servable(config.get_text_config(), context_length)
    return config


def build_decoder(config: Any, *, dtype: torch.dtype, device: torch.device, context_length: int) -> Decoder:
    """Build the fused decoder if it computes this model's function, else the one that runs the model's own code."""
    from tasks.sampling.engines.fused_decoder import FusedDecoder, fuses  # noqa: PLC0415 - they import transformers
    from tasks.sampling.engines.hf_decoder import HuggingFaceDecoder  # noqa: PLC0415

    if fuses(config):
        return FusedDecoder(config, dtype=dtype, device=device, context_length=context_length)
    return HuggingFaceDecoder(config, dtype=dtype, device=device)


def torch_weights(version: int, blocks: Mapping[str, TensorBlock]) -> dict[str, Tensor]:
    """Stored tensors as torch tensors, copied only where memory is read-only; EngineError for an unknown dtype."""
    try:
        return {name: as_torch(block) for name, block in blocks.items()}
    except ValueError as error:
        raise EngineError(f"weights {version}: {error}") from error


def matched_weights(model: Parameters, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the names of `model.shapes`; EngineError if a name is missing or unknown, or a shape differs."""
    unknown = sorted(name for name in tensors if name not in model.shapes and name not in model.aliases)
    matched = {name: tensor for name, tensor in tensors.items() if name in model.shapes}
    for alias in sorted(set(tensors) & set(model.aliases)):
        known = matched.setdefault(model.aliases[alias], tensors[alias])
        if known.shape != tensors[alias].shape or not torch.equal(known, tensors[alias]):
            raise EngineError(f"weights: {alias!r} differs from {model.aliases[alias]!r}, to which the model ties it")
    missing = sorted(set(model.shapes) - set(matched))
    if unknown or missing:
        raise EngineError(f"weights: missing {_few(missing)}; unknown {_few(unknown)}; allowed: the model's own names")
    for name, shape in model.shapes.items():
        if tuple(matched[name].shape) != tuple(shape):
            raise EngineError(f"weights: {name!r} has shape {tuple(matched[name].shape)}; allowed: {tuple(shape)}")
    return matched


def _check_servable(config: Any, context_length: int) -> None:
    kind = f"model_dir: model_type {config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise EngineError(f"{kind} is an encoder-decoder; allowed: decoder-only causal language models")
    maximum = getattr(config, "max_position_embeddings", None)
    if maximum is not None and context_length > maximum:
        raise EngineError(f"context_length: value {context_length}; allowed: up to the model's {maximum}")
    layer_types = getattr(config, "layer_types", None)
    strange = sorted(set(layer_types or ()) - _ATTENTION_TYPES)
    if strange:
        raise EngineError(f"{kind} has layers of type {', '.join(strange)}; allowed: attention over all positions")
    for field, layer_type in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention")):
        window = getattr(config, field, None)
        used = layer_type in layer_types if layer_types else getattr(config, "use_sliding_window", True)
        if window is not None and used and window < context_length:
            raise EngineError(f"{kind} has {field} {window}; allowed: at least context_length {context_length}")


def _few(names: list[str], count: int = 5) -> str:
    return (", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")) or "none"
