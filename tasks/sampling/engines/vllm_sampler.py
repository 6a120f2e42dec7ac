"""Keyed sampling inside vLLM, with the noise of tasks/sampling/engines/keyed_noise.py.

vLLM's two model runners pass logits to such code in two ways; this module serves both. Either way, the logit of the
sampled token becomes the token's log-prob, and every other logit of the row minus infinity. vLLM then takes the sampled
token, because its logit is the largest, and with `logprobs_mode="processed_logits"` returns the log-prob.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from storage.records.records import SamplingParams
from tasks.sampling.engines.keyed_noise import sample, signed64
from tasks.sampling.engines.sibling_rows import NO_SCOPE
from tasks.sampling.engines.vllm_names import resolve

ARGUMENT = "gleaner"


@dataclass(frozen=True, slots=True)
class Draw:
    """How the tokens of one request are drawn.

    Attributes:
        key: the key of the response's noise, as a signed 64-bit integer.
        origin: the number of prompt tokens; positions count from the prompt's end.
        temperature: 0 takes the most probable token.
        top_p: the least probability of the most probable tokens among which is drawn.
        top_k: the most tokens among which is drawn; 0: no limit.
        scope: requests of one scope draft for each other, see sibling_rows.py.
    """

    key: int
    origin: int
    temperature: float
    top_p: float
    top_k: int
    scope: int = NO_SCOPE

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0


UNUSED = Draw(key=0, origin=0, temperature=0.0, top_p=1.0, top_k=0)


def encode_draw(noise_key: int, origin: int, sampling: SamplingParams, scope: int = NO_SCOPE) -> dict[str, Any]:
    """The `extra_args` of a vLLM request."""
    return {ARGUMENT: [signed64(noise_key), origin, sampling.temperature, sampling.top_p, sampling.top_k, scope]}


def decode_draw(params: Any) -> Draw:
    """The Draw in vLLM's SamplingParams; ValueError if `encode_draw` did not put one there."""
    values = (params.extra_args or {}).get(ARGUMENT)
    if values is None:
        raise ValueError(f"extra_args has no {ARGUMENT!r}: this engine samples with keyed noise only")
    return Draw(*values)


class Rows:
    """The draws of several requests as tensors on the device, int64 or float32, one element per request."""

    def __init__(self, draws: list[Draw], device: torch.device) -> None:
        def upload(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)

        self.keys = upload([draw.key for draw in draws], torch.int64)
        self.origins = upload([draw.origin for draw in draws], torch.int64)
        self.temperature = upload([draw.temperature for draw in draws], torch.float32)
        self.top_p = upload([draw.top_p for draw in draws], torch.float32)
        self.top_k = upload([draw.top_k for draw in draws], torch.int64)


def put_draw(logits: Tensor, token_ids: Tensor, logprobs: Tensor) -> Tensor:
    """Set each row of logits [B, V] to -inf except at the sampled token, and there to its log-prob."""
    return logits.fill_(-torch.inf).scatter_(1, token_ids.unsqueeze(1), logprobs.unsqueeze(1).to(logits.dtype))


class KeyedBatchRows(resolve("BatchRowsProcessor")):  # type: ignore[misc]
    """Keyed sampling for model runner V1, which reports the requests that enter, leave or change rows of its batch.

    Positions are kept on the device, where every step adds one. They are sent again only when the host sees that some
    row did not advance by one: a request came, or its prompt is computed in pieces.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002
        self._device = device
        self._draws: dict[int, tuple[Draw, int, list[int]]] = {}
        self._rows: Rows | None = None
        self._truncated = self._greedy = False
        self._outputs: list[list[int]] = []
        self._lengths = np.empty(0, dtype=np.int64)
        self._prompt_positions = np.empty(0, dtype=np.int64)
        self._positions: Tensor | None = None

    @classmethod
    def validate_params(cls, params: Any) -> None:
        decode_draw(params)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._draws.pop(row, None)
        for row, params, prompt, output in batch_update.added:
            self._draws[row] = (decode_draw(params), len(prompt or ()), output)
        for first, second, direction in batch_update.moved:
            here, there = self._draws.pop(first, None), self._draws.pop(second, None)
            if here is not None:
                self._draws[second] = here
            if there is not None and direction == resolve("MoveDirectionality").SWAP:
                self._draws[first] = there
        self._rows = None

    def apply(self, logits: Tensor) -> Tensor:
        if not self._draws:
            return logits
        if self._rows is None or len(self._outputs) != logits.shape[0]:
            self._settle(logits.shape[0])
        rows, positions = self._rows, self._advance()
        assert rows is not None
        token_ids, logprobs = sample(
            logits,
            rows.keys,
            positions,
            rows.temperature,
            rows.top_p,
            rows.top_k,
            truncated=self._truncated,
            greedy=self._greedy,
        )
        return put_draw(logits, token_ids, logprobs)

    def _settle(self, count: int) -> None:
        """Rebuild all tensors after rows have come, gone or moved."""
        entries = [self._draws[row] for row in range(count)]
        draws = [draw for draw, _, _ in entries]
        self._rows = Rows(draws, self._device)
        self._truncated = any(draw.truncated for draw in draws)
        self._greedy = any(draw.temperature == 0 for draw in draws)
        self._outputs = [output for _, _, output in entries]
        self._prompt_positions = np.array([prompt - draw.origin for draw, prompt, _ in entries], dtype=np.int64)
        self._positions = None

    def _advance(self) -> Tensor:
        """The position of each row's next token, int64 [B] on the device."""
        lengths = np.fromiter(map(len, self._outputs), dtype=np.int64, count=len(self._outputs))
        if self._positions is not None and np.array_equal(lengths, self._lengths + 1):
            self._positions = self._positions + 1
        elif self._positions is None or not np.array_equal(lengths, self._lengths):
            self._positions = torch.from_numpy(self._prompt_positions + lengths).to(self._device, non_blocking=True)
        self._lengths = lengths
        return self._positions


class KeyedSlots(resolve("SlotProcessor")):  # type: ignore[misc]
    """Keyed sampling for model runner V2, which gives every request a fixed slot, and positions on the device.

    A speculator may set `occupy`, which is told the slot and the scope of each new request.
    """

    occupy: Callable[[int, int], None] | None = None

    def __init__(self, vllm_config: Any, req_states: Any) -> None:  # noqa: ARG002
        self._device = req_states.device
        self._draws = [UNUSED] * req_states.max_num_reqs
        self._truncated = np.zeros(req_states.max_num_reqs, dtype=bool)
        self._greedy = np.ones(req_states.max_num_reqs, dtype=bool)
        self._rows: Rows | None = None

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        decode_draw(sampling_params)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        # vLLM warms up its kernels with requests of its own, which carry no draw and need only be accepted.
        ours = ARGUMENT in (sampling_params.extra_args or {})
        draw = decode_draw(sampling_params) if ours else UNUSED
        self._draws[req_idx] = draw
        self._truncated[req_idx], self._greedy[req_idx] = draw.truncated, draw.temperature == 0
        self._rows = None
        if self.occupy is not None:
            self.occupy(req_idx, draw.scope)
        return ours

    def apply_staged_writes(self) -> None:
        if self._rows is None:
            self._rows = Rows(self._draws, self._device)

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        self.apply_staged_writes()
        rows, slots = self._rows, ctx.expanded_idx_mapping.long()
        assert rows is not None
        # `pos` is the position of the token just fed; the token to be drawn follows it.
        token_ids, logprobs = sample(
            logits,
            rows.keys[slots],
            ctx.pos + 1 - rows.origins[slots],
            rows.temperature[slots],
            rows.top_p[slots],
            rows.top_k[slots],
            truncated=bool(self._truncated[ctx.idx_mapping_np].any()),
            greedy=bool(self._greedy[ctx.idx_mapping_np].any()),
        )
        return put_draw(logits, token_ids, logprobs)
