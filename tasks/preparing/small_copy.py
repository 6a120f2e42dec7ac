"""A small copy of a model: its configuration with fewer and narrower layers, and random weights.

Every field on how the model computes stays (the kinds of layers, the size of a head, positions, scales, experts), so
the copy shows in a second whether engine and trainer agree about models of the kind.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_HEADS, _WIDTH, _VOCABULARY, _LAYERS = 4, 64, 64, 8
# More would be slow, and large where little memory is.
_PARAMETERS_MAX = 50_000_000


def save_small_copy(config: Any, directory: Path) -> bool:
    """Save a small copy of a model of a transformers configuration; False if the fields allow no copy.

    The directory gets config.json and safetensors, as transformers stores both.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    small = small_config(config)
    if small is None:
        return False
    try:
        with torch.device("meta"):
            sizes = AutoModelForCausalLM.from_config(small, trust_remote_code=False)
        if sum(parameter.numel() for parameter in sizes.parameters()) > _PARAMETERS_MAX:
            return False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, trust_remote_code=False)
            _draw(model)
    except Exception:  # noqa: BLE001 - a class may refuse any combination of fields that it does not have in the wild
        return False
    with _silent():
        model.save_pretrained(directory)
    return True


def small_config(config: Any) -> Any | None:
    """The configuration with few narrow layers; None without the usual fields of width and depth."""
    small = copy.deepcopy(config)
    try:
        heads, hidden, layers = small.num_attention_heads, small.hidden_size, small.num_hidden_layers
        if not all(isinstance(each, int) and each > 0 for each in (heads, hidden, layers)):
            return None
        # Where the size of a head does not follow from the width, any width will do.
        width = _WIDTH if hidden % heads or getattr(small, "head_dim", None) else hidden // heads * _HEADS
        kv_heads = _HEADS if _kv_heads(small) in (None, heads) else _HEADS // 2
        _set(small, num_attention_heads=_HEADS, hidden_size=width, vocab_size=_VOCABULARY)
        _set(small, word_embed_proj_dim=width, pad_token_id=None, bos_token_id=0, eos_token_id=0)
        _set(small, num_key_value_heads=kv_heads, num_kv_heads=kv_heads)
        _keep_layers(small, layers)
    except Exception:  # noqa: BLE001 - a class may check its fields by any rule, with errors of its own
        return None
    for name, value in small.to_dict().items():
        is_width = "intermediate" in str(name) or str(name).startswith("ffn")
        if is_width and isinstance(value, int) and not isinstance(value, bool) and value > _WIDTH:
            setattr(small, name, _WIDTH)
    return small


def _kv_heads(config: Any) -> Any:
    return getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)


def _set(config: Any, **values: Any) -> None:
    """Set the given fields as far as a configuration has them, also by the names of the configuration's family."""
    known = {*config.to_dict(), *config.attribute_map}
    for name, value in values.items():
        if name in known:
            setattr(config, name, value)


def _keep_layers(config: Any, layers: int) -> None:
    """Keep the first layers: enough for every listed kind of layer, and one more than a mixture's dense layers."""
    fields = config.to_dict()
    by_layer = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == layers}
    kept = 2
    for values in by_layer.values():
        kinds = [repr(value) for value in values]
        if len(set(kinds)) <= _LAYERS:
            kept = max(kept, max(kinds.index(kind) for kind in set(kinds)) + 1)
    dense = fields.get("first_k_dense_replace")
    kept = min(layers, max(kept, dense + 1 if isinstance(dense, int) else 0), _LAYERS)
    _set(config, num_hidden_layers=kept)
    for name, values in by_layer.items():
        setattr(config, name, values[:kept])


def _draw(model: Any) -> None:
    """Draw weights whose distributions are neither flat nor certain, so a difference shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.1 if "emb" in name else parameter.shape[-1] ** -0.5)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1)
            else:
                parameter.uniform_(0.8, 1.2)


@contextmanager
def _silent() -> Iterator[None]:
    """Without transformers' bars of progress."""
    from transformers.utils import logging  # noqa: PLC0415 - takes seconds

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
