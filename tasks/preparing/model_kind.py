"""The refusals of a model by config.json and the headers of the weights alone, without torch."""

import json
import re
from pathlib import Path
from typing import Any

from resources.model_config import CONFIG, model_fields
from tasks.learning.pretrained import ModelError, tensor_headers, vocabulary_size

_QUANTISED = ("quantization_config", "compression_config")
# What quantised checkpoints store beside, or in place of, plain weights: GPTQ and AWQ, FP8, bitsandbytes, MXFP4.
_PACKED = re.compile(
    r"\.(qweight|qzeros|g_idx|weight_packed|weight_scale|weight_scale_inv|SCB|absmax|quant_map)$|_scale_inv$|_blocks$"
    r"|\.(quant_state|absmax|quant_map|nested_\w+)(\.|$)"
)
_DEQUANTISE = (
    "allowed: weights in float32, bfloat16 or float16 (take the checkpoint that was quantised, or let transformers "
    "dequantise the weights and save them)"
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def check_kind(model_dir: Path) -> None:
    """Raise ModelError for a model that neither engine nor trainer can use, by config.json and headers."""
    fields, place = model_fields(model_dir), f"policy.path: {model_dir / CONFIG}"
    for name in _QUANTISED:
        if fields.get(name):
            raise ModelError(f"{place}: {name} says that the weights are quantised{_by(fields[name])}; {_DEQUANTISE}")
    if fields.get("is_encoder_decoder") is True:
        raise ModelError(
            f"{place}: {_type(fields)} is an encoder-decoder; allowed: decoder-only causal language models"
        )
    headers = tensor_headers(model_dir)
    for name, (dtype, _) in headers.items():
        if dtype.startswith(("F8", "F4", "F6")) or _PACKED.search(name):
            raise ModelError(
                f"policy.path: tensor {name!r} with dtype {dtype} belongs to quantised weights; {_DEQUANTISE}"
            )
    for name in _LAYERS:
        layers = fields.get(name)
        if isinstance(layers, int) and layers > len(headers):
            raise ModelError(
                f"{place}: {name} is {layers}, and the weights have {len(headers)} tensors; allowed: fewer"
            )


def beyond_embeddings(model_dir: Path) -> str | None:
    """A doubt about tokens of the tokenizer without an embedding in the model; None without such tokens."""
    vocab_size = vocabulary_size(model_dir)
    try:
        added = json.loads((model_dir / "tokenizer.json").read_bytes())["added_tokens"]
        beyond = [str(token["content"]) for token in added if token["id"] >= vocab_size]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # another kind of tokenizer, or one that is refused when it is opened
    if not beyond:
        return None
    return (
        f"policy.path: {len(beyond)} tokens of the tokenizer, such as {beyond[0][:40]!r}, have ids from {vocab_size} "
        "(vocab_size) on, for which the model has no embedding: no text of a prompt or an environment may hold them"
    )


def _by(settings: Any) -> str:
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return f" ({method})" if isinstance(method, str) else ""


def _type(fields: dict[str, Any]) -> str:
    return f"model_type {str(fields.get('model_type'))[:80]!r}"
