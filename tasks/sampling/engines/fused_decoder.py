"""The fast decoder for the plain Llama shape: Llama, Mistral, Qwen2, Qwen3 with full attention.

The model consists of pre-norm blocks of grouped-query attention with rotary positions and a gated SiLU feed-forward.
Projections of a common input (query, key and value; gate and up) are one matrix product. On a CPU in float32 the
matrices are kept in oneDNN's own layout, in which a product of few rows runs at about twice the speed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its customary name
from torch import Tensor
from transformers import AutoModelForCausalLM

from tasks.sampling.engines.kernels import bound_compiled_products
from tasks.sampling.engines.window import Window

_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
# The other types depend on the length of the sequence, which differs within a batch.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
_EMBEDDING, _FINAL_NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_ATTENTION_NORM, _FEED_FORWARD_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def fuses(config: Any) -> bool:
    """Whether this decoder can compute the model of this Hugging Face configuration."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in _MODEL_TYPES
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _ROPE_TYPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A linear map [out, in] with its bias; the weight may be packed by oneDNN."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.is_mkldnn:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # noqa: SLF001
            return packed
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: _Matrix
    qk_norm: Tensor | None  # [heads + kv_heads, size]
    output: _Matrix
    feed_forward_norm: Tensor
    gate_up: _Matrix
    down: _Matrix


@dataclass(frozen=True, slots=True)
class _Ends:
    embedding: Tensor
    final_norm: Tensor
    head: _Matrix


class FusedDecoder:
    """See the module's docstring; `fuses` must be true for `config`."""

    def __init__(self, config: Any, *, dtype: torch.dtype, device: torch.device, context_length: int) -> None:
        self._dtype = dtype
        self._device = device
        self._packs = device.type == "cpu" and dtype == torch.float32 and _has_onednn()
        with torch.device("meta"):
            self.module: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        self._num_layers: int = config.num_hidden_layers
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._epsilon: float = config.rms_norm_eps
        self._cos, self._sin = _rotations(type(self.module.model.rotary_emb)(config), context_length, dtype, device)
        self._layers: dict[int, _Layer] = {}
        self._ends: _Ends | None = None
        self._lasting: Collection[int] = ()
        # Where the tensors begin that are kept without a copy, and which of them came last: they are others' memory,
        # which is never written.
        self._borrowed: set[int] = set()
        self._coming: set[int] = set()

    @property
    def packed_heads(self) -> tuple[int, int, int]:
        return self._heads, self._kv_heads, self._size

    def load(self, tensors: Iterable[tuple[str, Tensor]], lasting: Collection[int] = ()) -> None:
        given = dict(tensors)
        self._lasting = lasting
        self._coming = set()
        # Layer by layer, so that old and new weights of the whole model are never in memory together.
        for index in range(self._num_layers):
            prefix = f"model.layers.{index}."
            weights = {name.removeprefix(prefix): tensor for name, tensor in given.items() if name.startswith(prefix)}
            self._layers[index] = self._put(self._layers.get(index), self._layer(weights))
        self._ends = self._put(self._ends, self._new_ends(given))
        self._lasting, self._borrowed = (), self._coming

    def prefill(self, token_ids: Tensor, window: Window) -> None:
        self._hidden(token_ids, window)

    def logits(self, token_ids: Tensor, window: Window) -> Tensor:
        ends = self._loaded()
        return ends.head(self._norm(self._hidden(token_ids, window), ends.final_norm))

    def _hidden(self, token_ids: Tensor, window: Window) -> Tensor:
        """Hidden states [N, hidden] after the last layer."""
        x = self._loaded().embedding[token_ids.view(-1)]
        positions = window.positions.reshape(-1)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        for index, layer in self._layers.items():
            attended = self._attention(index, layer, self._norm(x, layer.attention_norm), cos, sin, window)
            x = x + layer.output(attended)
            gate, up = layer.gate_up(self._norm(x, layer.feed_forward_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return x

    def _attention(self, index: int, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, window: Window) -> Tensor:
        """The attention of new tokens x [N, hidden] over the window, [N, heads * size]."""
        size, rotating = self._size, self._heads + self._kv_heads
        heads = layer.qkv(x).view(-1, rotating + self._kv_heads, size)
        qk, values = heads[:, :rotating], heads[:, rotating:]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (size,), None, self._epsilon) * layer.qk_norm
        qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
        return window.attend(index, qk[:, : self._heads], qk[:, self._heads :], values)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._epsilon)

    def _layer(self, weights: Mapping[str, Tensor]) -> _Layer:
        def matrix(*names: str) -> _Matrix:
            biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
            return self._matrix([weights[f"{name}.weight"] for name in names], biases)

        qk_norm = None
        if _QK_NORMS[0] in weights:
            q_norm, k_norm = (self._placed(weights[name]) for name in _QK_NORMS)
            qk_norm = torch.cat([q_norm.expand(self._heads, -1), k_norm.expand(self._kv_heads, -1)])
        return _Layer(
            attention_norm=self._placed(weights[_ATTENTION_NORM]),
            qkv=matrix(*_QKV),
            qk_norm=qk_norm,
            output=matrix("self_attn.o_proj"),
            feed_forward_norm=self._placed(weights[_FEED_FORWARD_NORM]),
            gate_up=matrix(*_GATE_UP),
            down=matrix("mlp.down_proj"),
        )

    def _new_ends(self, weights: Mapping[str, Tensor]) -> _Ends:
        embedding, head = self._placed(weights[_EMBEDDING]), weights.get(_HEAD)
        if head is None and not self._packs:
            matrix = _Matrix(embedding, None)
        else:
            matrix = self._matrix([weights[_EMBEDDING] if head is None else head], [])
        return _Ends(embedding, self._placed(weights[_FINAL_NORM]), matrix)

    def _loaded(self) -> _Ends:
        assert self._ends is not None, "the engine loads weights first"
        return self._ends

    def _matrix(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> _Matrix:
        weight = self._joined(weights)
        bias = self._joined(biases) if biases else None
        if self._packs:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001 - the only way to keep a packed matrix
        return _Matrix(weight, bias)

    def _placed(self, tensor: Tensor) -> Tensor:
        """In the decoder's dtype and device: a copy, unless it lasts, because the caller may overwrite its memory."""
        placed = tensor.to(device=self._device, dtype=self._dtype, copy=id(tensor) not in self._lasting)
        if placed is tensor:
            self._borrowed.add(placed.data_ptr())
            self._coming.add(placed.data_ptr())
        return placed

    def _put(self, old: Any, new: Any) -> Any:
        """Copy new weights (a tensor, or a dataclass of tensors) into the memory of the old weights, if there are any.

        Borrowed tensors and tensors in oneDNN's layout are replaced, because a copy must not or cannot overwrite them.
        """
        if old is None or new is None or (isinstance(new, Tensor) and new.is_mkldnn):
            return new
        if isinstance(new, Tensor):
            return new if {old.data_ptr(), new.data_ptr()} & self._borrowed else old.copy_(new)
        return type(new)(
            **{each.name: self._put(getattr(old, each.name), getattr(new, each.name)) for each in fields(new)}
        )

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the parts along the rows; a single part is only moved to the device."""
        if len(parts) == 1:
            return self._placed(parts[0])
        return torch.cat([part.to(device=self._device, dtype=self._dtype) for part in parts])


def _has_onednn() -> bool:
    bound_compiled_products()
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]  # torch leaves it unannotated


def _rotations(
    rotary: torch.nn.Module, context_length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(cos, sin) [context_length, size] of the model's own rotary module, the sine signed for a roll by half a head.

    The rotation is x * cos + rotate_half(x) * sin with rotate_half(x) = (-x2, x1). Here (x2, x1) is a roll, and the
    minus sign is put into the first half of the sine.
    """
    cos, sin = rotary(torch.zeros(1, dtype=dtype), torch.arange(context_length).unsqueeze(0))
    half = sin.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    return cos[0].to(device), sin[0].to(device)
