"""The size of a dense decoder, from its config.json: bytes of the weights and of each cached token."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

# Caches are bfloat16, unless a caller says otherwise.
CACHE_VALUE_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The size of a model.

    Attributes:
        parameters: number of parameters.
        looked_up: parameters of an untied embedding, of which a token reads a single row.
        weight_bytes: bytes per parameter.
        kv_bytes_per_token: bytes of keys and values of all layers.
        windowed_layers: number of layers that attend to, and cache, only the last `window` tokens.
        linears: (name, inputs, outputs) of the linear maps of a layer; empty if only the size is known.
    """

    parameters: float
    looked_up: float = 0.0
    weight_bytes: int
    kv_bytes_per_token: float
    layers: int
    windowed_layers: int = 0
    window: int = 0
    linears: tuple[tuple[str, int, int], ...] = field(default=(), compare=False, repr=False)

    def adapter_values(self, rank: int, targets: Collection[str] = ()) -> float:
        """The values in both factors of LoRA adapters of this rank on the linear maps whose names end with a target.

        Without targets, or with targets of another family, every map counts. If no map is known, a layer has the maps
        of `width`.
        """
        ends = {target.rpartition(".")[2] for target in targets}
        sizes = [inputs + outputs for name, inputs, outputs in self.linears if not ends or name in ends]
        sizes = sizes or [inputs + outputs for _, inputs, outputs in self.linears]
        # Four maps from width to width, and two between width and four times as much.
        return self.layers * rank * (sum(sizes) if sizes else 18 * self.width)

    def cache_bytes(self, tokens: float) -> float:
        """The keys and values of a response with so many tokens, in an engine that keeps no more than a window."""
        windowed = self.windowed_layers / max(1, self.layers)
        kept = (1 - windowed) * tokens + windowed * min(tokens, self.window)
        return self.kv_bytes_per_token * kept

    @property
    def bytes(self) -> float:
        return self.parameters * self.weight_bytes

    @property
    def multiplied(self) -> float:
        """The parameters by which every token is multiplied."""
        return self.parameters - self.looked_up

    @property
    def outer(self) -> float:
        """The parameters of the embedding and the head, which are the same if they are tied; 0 if no map is known."""
        return self.parameters - self.layers * sum(a * b for _, a, b in self.linears) if self.linears else 0.0

    @property
    def widths(self) -> tuple[float, float, float, float]:
        """Values of a token: between layers, in all queries, in all keys, and within a gated feed-forward block."""
        of = {name: outputs for name, _, outputs in self.linears}
        if not of:
            # As many parameters as `width` assumes.
            return self.width, self.width, self.width, self.width * 8 / 3
        return of["o_proj"], of["q_proj"], of["k_proj"], of["gate_proj"]

    @property
    def width(self) -> float:
        """Values of a token between two layers, if a layer has 12 parameters for each pair of them."""
        return math.sqrt(self.parameters / (12 * self.layers)) if self.layers else 0.0


def size_from_config(document: Mapping[str, Any], weight_bytes: int) -> ModelSize:
    """The size of a dense decoder, from the fields of its config.json.

    Counts embeddings, attention with grouped keys and values, and a gated feed-forward block; leaves out biases and
    norms, a thousandth. Raises ValueError, which names the missing field, and for mixtures of experts.
    """
    if any(document.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError(
            "policy.path: value a mixture of experts; allowed: a dense model, or forecast.parameters_billions, "
            "forecast.kv_bytes_per_token, forecast.step_s and forecast.train_s_per_token"
        )
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [name for name in names if not isinstance(document.get(name), int)]
    if missing:
        raise ValueError(
            f"policy.path: config.json has no number {missing[0]!r}; allowed: forecast.parameters_billions"
        )
    hidden, layers, heads, inner, vocabulary = (int(document[name]) for name in names)
    kv_heads = int(document.get("num_key_value_heads") or heads)
    head = int(document.get("head_dim") or hidden // heads)
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    windowed, window = _windows(document, layers)
    looked_up = 0 if document.get("tie_word_embeddings") else vocabulary * hidden
    return ModelSize(
        parameters=float(looked_up + vocabulary * hidden + layers * (attention + 3 * hidden * inner)),
        looked_up=float(looked_up),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=float(2 * layers * kv_heads * head * CACHE_VALUE_BYTES),
        layers=layers,
        windowed_layers=windowed,
        window=window,
        linears=(
            ("q_proj", hidden, heads * head),
            ("k_proj", hidden, kv_heads * head),
            ("v_proj", hidden, kv_heads * head),
            ("o_proj", heads * head, hidden),
            ("gate_proj", hidden, inner),
            ("up_proj", hidden, inner),
            ("down_proj", inner, hidden),
        ),
    )


# Which kinds of layers attend to a window, and the field that has its width.
_WINDOWS = (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size"))


def _windows(document: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """How many layers attend to a window, and its width; (0, 0) for none."""
    types = document.get("layer_types")
    for kind, name in _WINDOWS:
        width = document.get(name)
        if not isinstance(width, int) or width < 1:
            continue
        if isinstance(types, list):
            windowed = min(layers, types.count(kind))
        elif kind == _WINDOWS[0][0] and document.get("use_sliding_window", True):
            # The first layers of Qwen2 have none.
            windowed = layers - min(layers, int(document.get("max_window_layers") or 0))
        else:
            continue
        if windowed:
            return windowed, width
    return 0, 0
