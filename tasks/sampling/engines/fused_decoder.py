"""The fast decoder for the plain Llama shape: Llama, Mistral, Qwen2, Qwen3 with full attention.

The model consists of pre-norm blocks of grouped-query attention with rotary positions and a gated SiLU feed-forward.
Projections that read the same input are one matrix product. On a CPU in float32 the matrices are kept in oneDNN's own
layout, in which a product of few rows runs at about twice the speed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its customary name
from torch import Tensor
from transformers import AutoModelForCausalLM

from tasks.sampling.engines.compiled_products import bound_compiled_products
from tasks.sampling.engines.kv_cache import KeyValueCache, Window

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

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        given = dict(tensors)
        # Layer by layer, so that old and new weights of the whole model are never in memory together.
        for index in range(self._num_layers):
            prefix = f"model.layers.{index}."
            self._layers[index] = self._layer(
                {name.removeprefix(prefix): tensor for name, tensor in given.items() if name.startswith(prefix)}
            )
        self._embedding = self._placed(given[_EMBEDDING])
        self._final_norm = self._placed(given[_FINAL_NORM])
        head = given.get(_HEAD)
        if head is None and not self._packs:
            self._head = _Matrix(self._embedding, None)
        else:
            self._head = self._matrix([given[_EMBEDDING] if head is None else head], [])

    def prefill(self, token_ids: Tensor, window: Window, cache: KeyValueCache) -> None:
        self._hidden(token_ids, window, cache)

    def logits(self, token_ids: Tensor, window: Window, cache: KeyValueCache) -> Tensor:
        return self._head(self._norm(self._hidden(token_ids, window, cache), self._final_norm))

    def _hidden(self, token_ids: Tensor, window: Window, cache: KeyValueCache) -> Tensor:
        """Hidden states [n * T, hidden] after the last layer."""
        length = token_ids.shape[1]
        x = self._embedding[token_ids.view(-1)]
        positions = window.positions.reshape(-1)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        # The query heads that share a key head are computed as further rows of its attention product.
        mask = window.mask.repeat(1, 1, self._heads // self._kv_heads, 1) if length > 1 else window.mask
        for index, layer in self._layers.items():
            attended = self._attention(index, layer, self._norm(x, layer.attention_norm), cos, sin, mask, window, cache)
            x = x + layer.output(attended)
            gate, up = layer.gate_up(self._norm(x, layer.feed_forward_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return x

    def _attention(
        self,
        index: int,
        layer: _Layer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        window: Window,
        cache: KeyValueCache,
    ) -> Tensor:
        """The attention of new tokens x [n * T, hidden] over the window, [n * T, heads * size]."""
        count, size, kv_heads = window.count, self._size, self._kv_heads
        rotating = self._heads + kv_heads
        heads = layer.qkv(x).view(-1, rotating + kv_heads, size)
        qk, values = heads[:, :rotating], heads[:, rotating:]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (size,), None, self._epsilon) * layer.qk_norm
        qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
        queries = qk[:, : self._heads].reshape(count, -1, kv_heads, self._heads // kv_heads, size)
        length = queries.shape[1]
        queries = queries.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, size)
        keys = qk[:, self._heads :].reshape(count, length, kv_heads, size)
        seen_keys, seen_values = cache.write(index, window, keys, values.reshape(count, length, kv_heads, size))
        attended = F.scaled_dot_product_attention(queries, seen_keys, seen_values, attn_mask=mask)
        attended = attended.view(count, kv_heads, -1, length, size).permute(0, 3, 1, 2, 4)
        return attended.reshape(count * length, self._heads * size)

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

    def _matrix(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> _Matrix:
        weight = torch.cat([self._placed(part) for part in weights])
        bias = torch.cat([self._placed(part) for part in biases]) if biases else None
        if self._packs:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001 - the only way to keep a packed matrix
        return _Matrix(weight, bias)

    def _placed(self, tensor: Tensor) -> Tensor:
        """A copy in the decoder's dtype and device, because the caller may overwrite its memory after `load`."""
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)


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
