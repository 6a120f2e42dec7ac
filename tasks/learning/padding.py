"""Padding: the cost of a batch of unequal sequences, and the division of responses into passes. Pure functions.

No function needs tensors, so a process that only divides responses into micro-batches does not import torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

# The fixed cost of a forward and backward pass, in tokens: its calls, and one more addition to every gradient.
PASS_COST_TOKENS = 512
# Keys and values of a shared prompt are repeated for each response. Of the memory that a layer takes for a token, a
# repeated one takes at most one part in so many: 1/11 with as many key heads as heads, less with fewer.
REPEATED_PER_TOKEN = 8


def padded_tokens(lengths: Sequence[int]) -> int:
    """The tokens of a padded batch of sequences: the longest length times their number."""
    return max(lengths, default=0) * len(lengths)


class SharedPrompt(NamedTuple):
    """A prompt that several responses may share in a packed pass.

    Attributes:
        number: Equal for responses to one prompt.
        tokens: The number of prompt tokens that a pass computes once.
    """

    number: int
    tokens: int


def together(lengths: Sequence[int], prompt: SharedPrompt, *, packed: bool = False) -> int:
    """The tokens of a pass that responses to one prompt take together, counted as `passes` counts them.

    lengths: the tokens of each response, prompt included.
    """
    if not packed:
        return padded_tokens(lengths)
    return sum(lengths) - (len(lengths) - 1) * (prompt.tokens - prompt.tokens // REPEATED_PER_TOKEN)


def passes(
    lengths: Sequence[int], tokens_max: int, *, packed: bool = False, prompts: Sequence[SharedPrompt] | None = None
) -> list[list[int]]:
    """Divide a micro-batch's responses into forward passes of at most `tokens_max` tokens, with little padding.

    The responses are sorted by length, the longest first, and divided so that the padded tokens, plus PASS_COST_TOKENS
    for each pass, are fewest. Among equal divisions, the one with the largest first pass is taken. A response longer
    than `tokens_max` is a pass of its own.

    Args:
        lengths: The tokens of each response, prompt included.
        tokens_max: The most tokens of a pass.
        packed: Passes without padding: only real tokens count, and responses to one prompt lie together; a repeated
            token of a prompt counts 1 / REPEATED_PER_TOKEN.
        prompts: The prompt of each response, for packed passes; None: no two responses share one.

    Returns:
        The indices of each pass, ascending; every index occurs once.

    Raises:
        ValueError: The limit is below 1.
    """
    if tokens_max < 1:
        raise ValueError(f"tokens_max: value {tokens_max}; allowed: >= 1")
    if packed:
        alone = [SharedPrompt(index, 0) for index in range(len(lengths))]
        return [sorted(part) for part in _filled(lengths, tokens_max, prompts or alone)]
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    # For the sorted responses from each place on: their least cost, and where their first pass then ends.
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


def _filled(lengths: Sequence[int], tokens_max: int, prompts: Sequence[SharedPrompt]) -> list[list[int]]:
    """The responses of passes of at most `tokens_max` tokens, each filled before the next begins.

    The prompt with the longest response goes first; the responses of a prompt stay together, longest first.
    """
    longest: dict[int, int] = {}
    for length, prompt in zip(lengths, prompts, strict=True):
        longest[prompt.number] = max(length, longest.get(prompt.number, 0))

    def place(index: int) -> tuple[int, int, int, int]:
        number = prompts[index].number
        return -longest[number], number, -lengths[index], index

    found: list[list[int]] = []
    room, held = 0, None
    for index in sorted(range(len(lengths)), key=place):
        number, shared = prompts[index]
        tokens = lengths[index] - (shared - shared // REPEATED_PER_TOKEN if number == held else 0)
        if not found or tokens > room:
            found.append([])
            room, tokens = tokens_max, lengths[index]
        found[-1].append(index)
        room, held = room - tokens, number
    return found
