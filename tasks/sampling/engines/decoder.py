"""Decoder: a model's forward pass over the key-value cache, and the choice of a decoder for a model directory.

`fused_decoder` serves the plain Llama shape (Llama, Mistral, Qwen2, Qwen3), and `hf_decoder` runs the own code of every
other model. Models whose attention or positions the cache cannot serve are refused here.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from resources.model_config import positions_max
from storage.weights.tensor_sets import TensorBlock
from tasks.models.configuration import ModelConfigurationError, read_model_config
from tasks.models.stored_names import StoredNames, StoredNamesError
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.weight_tensors import as_torch
from tasks.sampling.engines.window import Window

_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


class Decoder(Protocol):
    """A model, which has no weights until `load`."""

    @property
    def module(self) -> Any:
        """The model of transformers whose names the decoder knows; its tensors may be on the device meta."""
        ...

    @property
    def packed_heads(self) -> tuple[int, int, int] | None:
        """Query heads, key heads and their size, if it serves any `Window`; None if it needs masks."""
        ...

    def load(self, tensors: Iterable[tuple[str, Tensor]], lasting: Collection[int] = ()) -> None:
        """Replace all tensors; names and shapes are those of `module`, tied ones once, and dtypes may differ.

        On a GPU the new tensors take the addresses of the old ones, which recorded steps read. lasting: the ids of
        tensors whose memory never changes, so that a decoder may keep them without a copy.
        """
        ...

    def prefill(self, token_ids: Tensor, window: Window) -> None:
        """Compute the keys and values of token_ids (int64 [n, T], those of `window` in its order)."""
        ...

    def logits(self, token_ids: Tensor, window: Window) -> Tensor:
        """Feed T tokens per row (int64 [n, T]) and return the logits [n * T, V] of what follows each, row by row."""
        ...


def model_config(model_dir: Path | str) -> Any:
    """The Hugging Face configuration of a model directory; raises EngineError if it is missing or unreadable."""
    try:
        return read_model_config(Path(model_dir))
    except ModelConfigurationError as error:
        raise EngineError(f"model_dir: {error}") from error


def read_config(model_dir: Path | str, context_length: int) -> Any:
    """Return `model_config` if our cache can serve such a model; raise EngineError otherwise."""
    config = model_config(model_dir)
    _check_servable(config.get_text_config(), context_length)
    return config


def build_decoder(config: Any, *, dtype: torch.dtype, device: torch.device, context_length: int) -> Decoder:
    """Build the fused decoder for a model of the plain Llama shape, and a HuggingFaceDecoder for any other model."""
    from tasks.sampling.engines.fused_decoder import FusedDecoder, fuses  # noqa: PLC0415 - they import transformers
    from tasks.sampling.engines.hf_decoder import HuggingFaceDecoder  # noqa: PLC0415

    if fuses(config):
        return FusedDecoder(config, dtype=dtype, device=device, context_length=context_length)
    return HuggingFaceDecoder(config, dtype=dtype, device=device, context_length=context_length)


def torch_weights(version: int, blocks: Mapping[str, TensorBlock]) -> dict[str, Tensor]:
    """Stored tensors as torch tensors, copied only where memory is read-only; EngineError for an unknown dtype."""
    try:
        return {name: as_torch(block) for name, block in blocks.items()}
    except ValueError as error:
        raise EngineError(f"weights {version}: {error}") from error


def matched_weights(module: Any, tensors: Mapping[str, Tensor]) -> StoredNames:
    """The names of stored tensors in a model of transformers; EngineError if they are not the model's."""
    try:
        names = StoredNames(module, tensors)
        names.check_ties(tensors)
    except StoredNamesError as error:
        raise EngineError(f"weights: {error}") from error
    return names


def _check_servable(config: Any, context_length: int) -> None:
    kind = f"model_dir: model_type {config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise EngineError(f"{kind} is an encoder-decoder; allowed: decoder-only causal language models")
    maximum = positions_max(config.to_dict())
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
