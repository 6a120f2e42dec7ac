"""Dealing: which rank trains which responses of a micro-batch. Pure functions.

Ranks gather a layer's parameters together, so all make the same number of passes; a rank without responses makes an
idle pass, which adds nothing. Nothing here depends on time, so a replay deals the same.
"""

from collections.abc import Sequence

import torch

from tasks.learning.batching import TokenBatch, collate
from tasks.learning.padding import passes

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


def dealt_passes(lengths: Sequence[int], tokens_max: int, world_size: int) -> list[list[list[int]]]:
    """The forward passes of every rank: [rank][pass] is the positions in it, [] for an idle pass.

    `tasks.learning.padding.passes` divides each rank's responses into passes of at most `tokens_max` padded tokens, and
    idle passes make their number equal on all ranks.
    """
    divided = []
    for hand in deal(lengths, world_size):
        parts = passes([lengths[position] for position in hand], tokens_max) if hand else []
        divided.append([[hand[index] for index in part] for part in parts])
    most = max(len(parts) for parts in divided)
    return [parts + [[]] * (most - len(parts)) for parts in divided]


def is_idle(batch: TokenBatch) -> bool:
    """Whether a batch is an `idle_batch`."""
    return batch.responses == (IDLE,)


def idle_batch(device: torch.device) -> TokenBatch:
    """A batch with one response of one token, for an idle pass; its loss must be multiplied by 0."""
    return collate([IDLE], [[0]], [[0]], [[0.0]]).to(device)
