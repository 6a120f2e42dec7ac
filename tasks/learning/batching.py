"""Batching: the padded tensors of a forward pass. Pure functions; `padding` decides which responses share a pass."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """B responses, padded on the right. L is the longest prompt + completion, T the longest completion.

    Attributes:
        responses: The B response ids, for messages.
        input_ids: [B, L] int64, prompt then completion then padding.
        prompt_lengths: [B] int64.
        completion_ids: [B, T] int64.
        response_mask: [B, T] bool, True on completion tokens.
        sampler_logprobs: [B, T] float32 as the engine recorded them, 0 on padding.
    """

    responses: tuple[int, ...]
    input_ids: Tensor
    prompt_lengths: Tensor
    completion_ids: Tensor
    response_mask: Tensor
    sampler_logprobs: Tensor

    @property
    def lengths(self) -> Tensor:
        """The completion tokens per response, [B] int64."""
        return self.response_mask.sum(dim=1)

    def to(self, device: torch.device) -> "TokenBatch":
        """The same batch on `device`."""
        tensors = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "responses"}
        return replace(self, **tensors)


def collate(
    responses: Sequence[int],
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    pad_id: int = 0,
) -> TokenBatch:
    """Pad B responses into one batch; shapes and dtypes as in `TokenBatch`.

    Args:
        responses: Response ids.
        prompt_ids: Prompt of each response, at least one token.
        completion_ids: Completion of each response, at least one token.
        logprobs: The sampler's log-prob of each completion token.
        pad_id: Any id of the vocabulary; padding follows everything that is read, so it has no effect.

    Raises:
        ValueError: The lists differ in length, or a prompt or completion is empty; names the response.
    """
    _check_rows(responses, prompt_ids, completion_ids, logprobs)
    completion_length = max(len(row) for row in completion_ids)
    lengths = torch.tensor([len(row) for row in completion_ids])
    inputs = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
    return TokenBatch(
        responses=tuple(responses),
        input_ids=_pad(inputs, max(len(row) for row in inputs), pad_id, np.int64),
        prompt_lengths=torch.tensor([len(row) for row in prompt_ids]),
        completion_ids=_pad(completion_ids, completion_length, pad_id, np.int64),
        response_mask=torch.arange(completion_length)[None, :] < lengths[:, None],
        sampler_logprobs=_pad(logprobs, completion_length, 0.0, np.float32),
    )


def _check_rows(
    responses: Sequence[int],
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
) -> None:
    counts = {len(rows) for rows in (responses, prompt_ids, completion_ids, logprobs)}
    if len(counts) != 1 or not responses:
        raise ValueError(f"batch: lists of {sorted(counts)} rows; allowed: equal numbers, at least one row")
    for response, prompt, completion, row in zip(responses, prompt_ids, completion_ids, logprobs, strict=True):
        if not len(prompt) or not len(completion):
            raise ValueError(
                f"response {response}: {len(prompt)} prompt and {len(completion)} completion tokens; allowed: >= 1"
            )
        if len(row) != len(completion):
            raise ValueError(
                f"response {response}: {len(row)} log-probs for {len(completion)} tokens; allowed: as many"
            )


def _pad(rows: Sequence[Sequence[float]], width: int, fill: float, dtype: type[np.generic]) -> Tensor:
    padded = np.full((len(rows), width), fill, dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)
