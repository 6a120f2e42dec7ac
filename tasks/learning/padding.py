"""Padding: what sequences of different lengths cost in one batch, and which share a forward pass. Pure functions.

They need no tensors, so that a process that only divides responses into micro-batches need not import torch.
"""

from collections.abc import Sequence

# The fixed cost of a forward and backward pass, in tokens: its calls, and one more addition to every gradient.
PASS_COST_TOKENS = 512


def padded_tokens(lengths: Sequence[int]) -> int:
    """The tokens of a padded batch of sequences: the longest length times their number."""
    return max(lengths, default=0) * len(lengths)


def passes(lengths: Sequence[int], tokens_max: int, *, packed: bool = False) -> list[list[int]]:
    """Divide a micro-batch's responses into forward passes of at most `tokens_max` tokens, with little padding.

    The responses are sorted by length, the longest first, and divided so that the padded tokens, plus PASS_COST_TOKENS
    for each pass, are fewest. Among equal divisions, the one with the largest first pass is taken. A response longer
    than `tokens_max` is a pass of its own.

    Args:
        lengths: The tokens of each response, prompt included.
        tokens_max: The most tokens of a pass.
        packed: Passes have no padding, so that only their own tokens count.

    Returns:
        The indices of each pass, ascending; every index occurs once.

    Raises:
        ValueError: The limit is below 1.
    """
    if tokens_max < 1:
        raise ValueError(f"tokens_max: value {tokens_max}; allowed: >= 1")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if packed:
        return [sorted(part) for part in _filled([(index, lengths[index]) for index in order], tokens_max)]
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


def _filled(responses: Sequence[tuple[int, int]], tokens_max: int) -> list[list[int]]:
    """The indices of (index, length) in passes of at most `tokens_max` tokens, each filled before the next begins."""
    found: list[list[int]] = []
    room = 0
    for index, length in responses:
        if not found or length > room:
            found.append([])
            room = tokens_max
        found[-1].append(index)
        room -= length
    return found
