"""Batching: which groups share an optimizer step, which rank trains which responses, and the tensors of a forward pass.

Pure functions; `padding` decides which responses share a pass. Ranks gather a layer's parameters together, so every
rank makes equally many passes; a rank without responses makes an idle pass, which adds nothing. Nothing here depends on
time, so a replay gives each rank the responses of the first training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tasks.learning.packed_row import repeated_tokens, same_prompts
from tasks.learning.padding import SharedPrompt, passes


@dataclass(frozen=True)
class TokenBatch:
    """B responses, padded on the right. L is the longest prompt + completion, T the longest completion.

    Attributes:
        responses: The B response ids, for messages.
        input_ids: [B, L] int64, prompt then completion then padding.
        prompt_lengths: The B lengths of the prompts.
        same_prompts: For each response, the first row with the response's prompt.
        total_lengths: The B lengths of prompt and completion.
        completion_ids: [B, T] int64.
        response_mask: [B, T] bool, True on the tokens that the policy sampled; they are trained. Observations and
            padding are outside.
        trained: [tokens] int64, the places of the tokens in the mask, counted through its rows. They are found on the
            CPU, because Python would wait for a GPU.
        trained_lengths: The number of trained tokens of each response.
        sampler_logprobs: [B, T] float32 as the engine recorded them, 0 outside the mask.
    """

    responses: tuple[int, ...]
    input_ids: Tensor
    prompt_lengths: tuple[int, ...]
    same_prompts: tuple[int, ...]
    total_lengths: tuple[int, ...]
    completion_ids: Tensor
    response_mask: Tensor
    trained: Tensor
    trained_lengths: tuple[int, ...]
    sampler_logprobs: Tensor

    @property
    def repeated_tokens(self) -> int:
        """The number of prompt tokens that a packed pass leaves out, because an earlier response shares the prompt."""
        return repeated_tokens(self.prompt_lengths, self.same_prompts)

    @property
    def lengths(self) -> Tensor:
        """The sampled tokens per response, [B] int64."""
        return self.response_mask.sum(dim=1)

    def to(self, device: torch.device) -> "TokenBatch":
        """The batch on `device`. A copy from the CPU to a GPU runs in the background; Python does not wait."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: each for name, each in held.items() if isinstance(each, Tensor)}
        moved: dict[str, Any] = {name: each.to(device, non_blocking=True) for name, each in tensors.items()}
        return replace(self, **moved)


def collate(
    responses: Sequence[int],
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    origins: Sequence[Sequence[int]] | None = None,
    pad_id: int = 0,
) -> TokenBatch:
    """Pad B responses into one batch; shapes and dtypes as in `TokenBatch`.

    Args:
        responses: Response ids.
        prompt_ids: Prompt of each response, at least one token.
        completion_ids: Completion of each response, at least one token.
        logprobs: The sampler's log-prob of each sampled token of the completion.
        origins: The lengths of each completion's stretches of tokens by the policy, an observation, the policy, and so
            on; None if the policy sampled all tokens.
        pad_id: Any id of the vocabulary; padding comes after every token that a causal model reads, so the id has no
            effect.

    Raises:
        ValueError: The lists differ in length, or a prompt or completion is empty; names the response.
    """
    origins = [(len(row),) for row in completion_ids] if origins is None else origins
    _check_rows(responses, prompt_ids, completion_ids, logprobs, origins)
    completion_length = max(len(row) for row in completion_ids)
    mask = torch.from_numpy(_sampled(origins, completion_length))
    # `masked_scatter` fills the mask row by row, which is the order of the log-probs.
    flat = torch.from_numpy(np.concatenate([np.asarray(row, dtype=np.float32) for row in logprobs]))
    inputs = [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
    return TokenBatch(
        responses=tuple(responses),
        input_ids=_pad(inputs, max(len(row) for row in inputs), pad_id, np.int64),
        prompt_lengths=tuple(map(len, prompt_ids)),
        same_prompts=same_prompts(prompt_ids),
        total_lengths=tuple(map(len, inputs)),
        completion_ids=_pad(completion_ids, completion_length, pad_id, np.int64),
        response_mask=mask,
        trained=mask.flatten().nonzero()[:, 0],
        trained_lengths=tuple(mask.sum(dim=1).tolist()),
        sampler_logprobs=torch.zeros(mask.shape).masked_scatter(mask, flat),
    )


def _sampled(origins: Sequence[Sequence[int]], width: int) -> npt.NDArray[np.bool_]:
    """Where the policy's tokens are, [B, width]."""
    mask = np.zeros((len(origins), width), dtype=np.bool_)
    for index, stretches in enumerate(origins):
        bounds = np.cumsum([0, *stretches])
        for start, end in zip(bounds[:-1:2], bounds[1::2], strict=True):
            mask[index, start:end] = True
    return mask


def _check_rows(
    responses: Sequence[int],
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    origins: Sequence[Sequence[int]],
) -> None:
    counts = {len(rows) for rows in (responses, prompt_ids, completion_ids, logprobs, origins)}
    if len(counts) != 1 or not responses:
        raise ValueError(f"batch: lists of {sorted(counts)} rows; allowed: equal numbers, at least one row")
    for response, prompt, completion, row, stretches in zip(
        responses, prompt_ids, completion_ids, logprobs, origins, strict=True
    ):
        if not len(prompt) or not len(completion):
            raise ValueError(
                f"response {response}: {len(prompt)} prompt and {len(completion)} completion tokens; allowed: >= 1"
            )
        if sum(stretches) != len(completion):
            raise ValueError(f"response {response}: stretches {tuple(stretches)} of {len(completion)} tokens")
        sampled = sum(stretches[::2])
        if len(row) != sampled:
            raise ValueError(
                f"response {response}: {len(row)} log-probs for {sampled} sampled tokens; allowed: as many"
            )


def _pad(rows: Sequence[Sequence[float]], width: int, fill: float, dtype: type[np.generic]) -> Tensor:
    padded = np.full((len(rows), width), fill, dtype=dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)


# The response number in an idle batch, which trains no response.
IDLE = -1


def deal(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """The positions of the responses that each rank trains, ascending; every position occurs once.

    Ranks are balanced by length: responses are dealt longest first, each to the rank with the fewest tokens so far, or
    the lowest such rank (LPT, Graham 1969: at most 4/3 of the best possible). One rank gets all, in order.

    Args:
        lengths: The tokens of each response, prompt included.
        world_size: The number of ranks.

    Raises:
        ValueError: There is less than one rank.
    """
    if world_size < 1:
        raise ValueError(f"world_size: value {world_size}; allowed: 1 or more")
    hands: list[list[int]] = [[] for _ in range(world_size)]
    tokens = [0] * world_size
    for position in sorted(range(len(lengths)), key=lambda position: (-lengths[position], position)):
        rank = min(range(world_size), key=lambda rank: (tokens[rank], len(hands[rank]), rank))
        hands[rank].append(position)
        tokens[rank] += lengths[position]
    return [sorted(hand) for hand in hands]


def dealt_passes(
    lengths: Sequence[int],
    tokens_max: int,
    world_size: int,
    *,
    packed: bool = False,
    prompts: Sequence[SharedPrompt] | None = None,
) -> list[list[list[int]]]:
    """The forward passes of every rank: [rank][pass] is the positions in it, [] for an idle pass.

    `tasks.learning.padding.passes` divides each rank's responses into passes of at most `tokens_max` tokens, and idle
    passes make their number equal on all ranks.
    """
    divided = []
    for hand in deal(lengths, world_size):
        its_own = None if prompts is None else [prompts[position] for position in hand]
        its_lengths = [lengths[position] for position in hand]
        parts = passes(its_lengths, tokens_max, packed=packed, prompts=its_own) if hand else []
        divided.append([[hand[index] for index in part] for part in parts])
    most = max(len(parts) for parts in divided)
    return [parts + [[]] * (most - len(parts)) for parts in divided]


def is_idle(batch: TokenBatch) -> bool:
    """Whether a batch is an `idle_batch`."""
    return batch.responses == (IDLE,)


def idle_batch(device: torch.device) -> TokenBatch:
    """A batch with one response of one token, for an idle pass; its loss must be multiplied by 0."""
    return collate([IDLE], [[0]], [[0]], [[0.0]]).to(device)


Group = TypeVar("Group")


def mini_batches(groups: Sequence[Group], count: int) -> list[Sequence[Group]]:
    """Divide groups, in order, into at most `count` parts of sizes that differ by at most one; none is empty.

    Groups stay whole, as in verl, whose ppo_mini_batch_size counts prompts.
    """
    if count < 1:
        raise ValueError(f"num_mini_batches: value {count}; allowed: >= 1")
    bounds = [len(groups) * part // count for part in range(count + 1)]
    return [groups[start:end] for start, end in pairwise(bounds) if start < end]
