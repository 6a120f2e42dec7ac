"""Batching: which groups share a forward pass, and the padded tensors of one. Pure functions.

A micro-batch holds whole groups, in the order given; nothing here depends on time or on what else is finished.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

# What a forward and backward pass costs beyond its tokens: the calls, and one more addition to every gradient.
PASS_COST_TOKENS = 512


@dataclass(frozen=True)
class TokenBatch:
    """Responses padded on the right. B responses, L the longest prompt + completion, T the longest completion.

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
        """[B] int64, completion tokens per response."""
        return self.response_mask.sum(dim=1)

    def to(self, device: torch.device) -> "TokenBatch":
        """The same batch on `device`."""
        tensors = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "responses"}
        return replace(self, **tensors)


def padded_tokens(lengths: Sequence[int]) -> int:
    """Tokens of a padded batch of sequences: the longest times their number."""
    return max(lengths, default=0) * len(lengths)


def passes(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Divide a micro-batch's responses into forward passes of at most `tokens_max` padded tokens, with little padding.

    Responses of similar lengths share a pass: among the divisions of the responses sorted by length, the longest first,
    the one with the fewest padded tokens, where a pass counts as PASS_COST_TOKENS besides; of equals, the one whose
    first pass is largest. A single response longer than `tokens_max` is a pass of its own.

    Returns:
        The indices of each pass, ascending; every index once.

    Raises:
        ValueError: A limit below 1.
    """
    if tokens_max < 1:
        raise ValueError(f"tokens_max: value {tokens_max}; allowed: >= 1")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    # Of the responses from each rank on: what they cost at least, and where their first pass then ends.
    costs, ends = [0] * (len(order) + 1), [0] * len(order)
    for start in reversed(range(len(order))):
        longest = max(1, lengths[order[start]])
        largest = min(len(order), start + max(1, tokens_max // longest))
        costs[start], ends[start] = min(
            ((longest * (end - start) + PASS_COST_TOKENS + costs[end], end) for end in range(largest, start, -1)),
            key=lambda found: found[0],
        )
    found, start = [], 0
    while start < len(order):
        found.append(sorted(order[start : ends[start]]))
        start = ends[start]
    return found


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
        pad_id: Any id of the vocabulary; padding comes after everything that is read, so it has no effect.

    Raises:
        ValueError: Lists of different lengths, or an empty prompt or completion; names the response.
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
