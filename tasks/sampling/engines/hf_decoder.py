"""The general decoder: a Hugging Face model's own forward pass, reading and writing our cache.

It is slower than the fused decoder, because every layer passes through the model's modules, but it serves any causal
language model whose attention takes its mask as an argument. The first load tests whether a model does.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.kv_cache import KeyValueCache, MaskedWindow
from tasks.sampling.engines.steady_positions import unsteady
from tasks.sampling.engines.window import Window

# Of a comparison: tokens of a short row, the most tokens of a long one, and how many follow the length that it crosses.
_FEW, _MANY, _AFTER = 6, 256, 3
# Fields of config.json whose values may be lengths from which on a model computes something else.
_A_LENGTH = re.compile("window|chunk|position|floor|seq|length|block")
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


class HuggingFaceDecoder:
    """Any causal language model that `AutoModelForCausalLM` builds."""

    def __init__(self, config: Any, *, dtype: torch.dtype, device: torch.device, context_length: int) -> None:
        self._dtype = dtype
        self._device = device
        self._stretches = _stretches(config.get_text_config().to_dict(), context_length)
        self._model = _build(config, dtype, device)
        if getattr(self._model, "_is_stateful", False):
            raise EngineError(f"model_dir: model_type {config.model_type!r} keeps a state; allowed: attention only")
        reason = unsteady(self._model, context_length)
        if reason is not None:
            raise EngineError(reason)
        self._checked = False

    @property
    def module(self) -> Any:
        return self._model

    @property
    def packed_heads(self) -> None:
        """None: a model's own code is given masks."""
        return

    def load(self, tensors: Iterable[tuple[str, Tensor]], lasting: Collection[int] = ()) -> None:  # noqa: ARG002 - the model keeps its memory
        """See `Decoder`. The first call also compares the cached pass with a plain one; EngineError if they differ."""
        state = self._model.state_dict()
        for name, tensor in tensors:
            state[name].copy_(tensor)
        if self._checked:
            return
        try:
            # A NaN is the largest here, as anywhere in this comparison.
            error = max((self._relative_error(*stretch) for stretch in self._stretches), key=_badness)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as failure:
            raise EngineError(f"{self._refusal}: {type(failure).__name__}: {failure}") from failure
        if not error <= _TOLERANCE[self._dtype]:
            raise EngineError(
                f"{self._refusal}: its logits differ by a relative {error:.2g} from those without a cache"
            )
        self._checked = True

    def prefill(self, token_ids: Tensor, window: Window) -> None:
        body = getattr(self._model, self._model.base_model_prefix, self._model)
        body(input_ids=token_ids, **_inputs(window))

    def logits(self, token_ids: Tensor, window: Window) -> Tensor:
        logits: Tensor = self._model(input_ids=token_ids, **_inputs(window)).logits
        return logits.flatten(0, 1)

    @property
    def _refusal(self) -> str:
        return (
            f"model_dir: {type(self._model).__name__} cannot decode from this cache "
            "(allowed: attention that takes its mask and positions as arguments)"
        )

    def _relative_error(self, first: int, count: int) -> float:
        """The relative error of the logits of two rows of different length, against a pass without a cache.

        The longer row has `count` tokens, from position `first` on; those before it are absent in both passes.
        """
        cache = KeyValueCache(rows=2, context_length=count + 2, dtype=self._dtype, device=self._device)
        vocab_size = self._model.get_input_embeddings().weight.shape[0]
        token_ids = torch.arange(1, 2 * count + 1, device=self._device).view(2, count).remainder(vocab_size)
        start = torch.zeros(2, dtype=torch.int64, device=self._device)
        body = getattr(self._model, self._model.base_model_prefix, self._model)
        window = cache.window(start, count - 1, count - 1)
        body(input_ids=token_ids[:, : count - 1], **_inputs(window, first))
        lengths = torch.tensor([count - 1, count - 3], device=self._device)
        last = token_ids.gather(1, lengths.unsqueeze(1))
        window = cache.window(lengths, 1, count)
        found = self._model(input_ids=last, **_inputs(window, first)).logits[:, -1].float()
        wanted = torch.stack([self._plain(token_ids[row, : n + 1], first) for row, n in enumerate(lengths.tolist())])
        return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))

    def _plain(self, token_ids: Tensor, first: int) -> Tensor:
        """The logits [V] after tokens (int64 [T]) from position `first` on, without a cache."""
        positions = {"position_ids": torch.arange(first, first + len(token_ids), device=self._device)[None]}
        # From position 0 on as the trainer does it, which gives none.
        logits: Tensor = self._model(input_ids=token_ids[None], **(positions if first else {})).logits
        return logits[0, -1].float()


class _CacheView(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The cache as a model's attention sees it during one forward pass."""

    def __init__(self, window: MaskedWindow) -> None:
        super().__init__(layers=[])
        self._window = window

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = key_states.transpose(1, 2), value_states.transpose(1, 2)
        return self._window.cache.write(layer_idx, self._window, keys, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - positions are given to the model explicitly
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return self._window.span, 0


def _inputs(window: Window, first: int = 0) -> dict[str, Any]:
    """What a forward pass takes beside the tokens; `first` is the position of the cache's first token."""
    assert isinstance(window, MaskedWindow), "a model's own code needs masks"
    return {
        "attention_mask": window.mask,
        "position_ids": (window.positions + first).expand(window.count, -1),
        "past_key_values": _CacheView(window),
        "use_cache": True,
    }


def _stretches(fields: Mapping[str, Any], context_length: int) -> list[tuple[int, int]]:
    """The stretches (first position, tokens) with which a decoder is compared with a plain pass.

    A model may change its function at a length that the configuration names. The stretches cross each such length
    within the context, and the end of the context: short ones from the first token on, long ones with a few tokens
    alone.
    """
    crossed = sorted({length for length in _lengths(fields) if length + _AFTER <= context_length})
    stretches = [(0, min(_FEW, max(4, context_length)))]
    for length in crossed:
        if length + _AFTER <= _MANY:
            stretches.append((0, length + _AFTER))
        else:
            stretches.append((length + _AFTER - _FEW, _FEW))
    stretches += [(context_length - _FEW, _FEW)] if context_length > _FEW else []
    return list(dict.fromkeys(stretches))


def _lengths(fields: Mapping[str, Any]) -> Iterator[int]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
        elif _A_LENGTH.search(str(name)) and isinstance(value, int) and value + _AFTER > _FEW:
            yield value


def _badness(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _build(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    # The initial values are discarded, and must not change the state of the caller's random generators.
    generators = [device] if device.type == "cuda" else []
    build = partial(AutoModelForCausalLM.from_config, config, dtype=dtype, trust_remote_code=False)
    with torch.random.fork_rng(devices=generators), torch.inference_mode(mode=False), device:
        try:
            model = build(attn_implementation="sdpa")
        except Exception:  # noqa: BLE001 - fields of a wrong kind raise anything in a model's code
            try:
                model = build(attn_implementation="eager")
            except Exception as error:
                reason = " ".join(str(error).split())
                raise EngineError(f"model_dir: no causal language model can be built: {reason}") from error
    return model.to(device).requires_grad_(requires_grad=False).eval()
