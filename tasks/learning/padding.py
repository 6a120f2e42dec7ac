"""Padding: what sequences of unlike lengths cost together, and which share a forward pass. Pure functions of lengths.

No tensors: who only divides responses into micro-batches does not wait for torch.
"""

from collections.abc import Sequence

# What a forward and backward pass costs beyond its tokens: the calls, and one more addition to every gradient.
PASS_COST_TOKENS = 512


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
