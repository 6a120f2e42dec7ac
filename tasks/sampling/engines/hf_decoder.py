"""The general decoder: a Hugging Face model's own forward pass, reading and writing our cache.

It is slower than the fused decoder, because every layer passes through the model's modules, but it serves any causal
language model whose attention takes its mask as an argument. The first load tests whether a model does.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.kv_cache import KeyValueCache, Window
from tasks.sampling.engines.tied_names import tied_names

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


class HuggingFaceDecoder:
    """Any causal language model that `AutoModelForCausalLM` builds."""

    def __init__(self, config: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._model = _build(config, dtype, device)
        if getattr(self._model, "_is_stateful", False):
            raise EngineError(f"model_dir: model_type {config.model_type!r} keeps a state; allowed: attention only")
        self.shapes, self.aliases = tied_names(self._model)
        self._checked = False

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Decoder`. The first call also compares the cached pass with a plain one; EngineError if they differ."""
        for name, tensor in tensors.items():
            self._model.get_parameter(name).copy_(tensor)
        if self._checked:
            return
        try:
            error = self._relative_error()
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as failure:
            raise EngineError(f"{self._refusal}: {type(failure).__name__}: {failure}") from failure
        if not error <= _TOLERANCE[self._dtype]:
            raise EngineError(
                f"{self._refusal}: its logits differ by a relative {error:.2g} from those without a cache"
            )
        self._checked = True

    def prefill(self, token_ids: Tensor, window: Window, cache: KeyValueCache) -> None:
        body = getattr(self._model, self._model.base_model_prefix, self._model)
        body(input_ids=token_ids, **_inputs(window, cache))

    def logits(self, token_ids: Tensor, window: Window, cache: KeyValueCache) -> Tensor:
        logits: Tensor = self._model(input_ids=token_ids, **_inputs(window, cache)).logits
        return logits[:, -1]

    @property
    def _refusal(self) -> str:
        return (
            f"model_dir: {type(self._model).__name__} cannot decode from this cache "
            "(allowed: attention that takes its mask and positions as arguments)"
        )

    def _relative_error(self) -> float:
        """The relative error of the logits of two rows of different length, against a pass without a cache."""
        cache = KeyValueCache(rows=2, context_length=8, dtype=self._dtype, device=self._device)
        vocab_size = self._model.get_input_embeddings().weight.shape[0]
        token_ids = torch.arange(1, 13, device=self._device).view(2, 6).remainder(vocab_size)
        start = torch.zeros(2, dtype=torch.int64, device=self._device)
        self.prefill(token_ids[:, :5], cache.window(start, 5, 5), cache)
        lengths = torch.tensor([5, 3], device=self._device)
        last = token_ids.gather(1, lengths.unsqueeze(1))
        found = self.logits(last, cache.window(lengths, 1, 6), cache).float()
        wanted = torch.stack(
            [self._model(input_ids=token_ids[row : row + 1, : n + 1]).logits[0, -1] for row, n in enumerate((5, 3))]
        ).float()
        return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


class _CacheView(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The cache as a model's attention sees it during one forward pass."""

    def __init__(self, window: Window, cache: KeyValueCache) -> None:
        super().__init__(layers=[])
        self._window = window
        self._cache = cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._cache.write(layer_idx, self._window, key_states.transpose(1, 2), value_states.transpose(1, 2))

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - positions are given to the model explicitly
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return self._window.span, 0


def _inputs(window: Window, cache: KeyValueCache) -> dict[str, Any]:
    return {
        "attention_mask": window.mask,
        "position_ids": window.positions.expand(window.count, -1),
        "past_key_values": _CacheView(window, cache),
        "use_cache": True,
    }


def _build(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    # The initial values are discarded, and must not change the state of the caller's random generators.
    generators = [device] if device.type == "cuda" else []
    build = partial(AutoModelForCausalLM.from_config, config, dtype=dtype, trust_remote_code=False)
    with torch.random.fork_rng(devices=generators), torch.inference_mode(mode=False), device:
        try:
            model = build(attn_implementation="sdpa")
        except (ValueError, ImportError):
            try:
                model = build(attn_implementation="eager")
            except (ValueError, KeyError, ImportError) as error:
                reason = " ".join(str(error).split())
                raise EngineError(f"model_dir: no causal language model can be built: {reason}") from error
    return model.to(device).requires_grad_(requires_grad=False).eval()
