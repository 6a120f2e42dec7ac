"""Mini-batches: which groups of an iteration share an optimizer step. A pure function."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

Group = TypeVar("Group")


def mini_batches(groups: Sequence[Group], count: int) -> list[Sequence[Group]]:
    """Divide groups, in order, into at most `count` parts of sizes that differ by at most one; none is empty.

    Groups stay whole, as in verl, whose ppo_mini_batch_size counts prompts.
    """
    if count < 1:
        raise ValueError(f"num_mini_batches: value {count}; allowed: >= 1")
    bounds = [len(groups) * part // count for part in range(count + 1)]
    return [groups[start:end] for start, end in pairwise(bounds) if start < end]
