"""The order of prompts: a pure function from a running position to a prompt, so that a run resumes from the position.

Every epoch is a permutation of all prompts; positions count on through all epochs.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def prompt_index(position: int, size: int, seed: int, shuffle: bool) -> tuple[int, int]:
    """The (epoch, index) of the prompt at a running `position` >= 0 among `size` prompts.

    Without `shuffle` every epoch is 0, 1, ..., size-1. Raises ValueError for a negative position or an empty set.
    """
    if position < 0:
        raise ValueError(f"position: value {position}; allowed: 0 or more")
    if size < 1:
        raise ValueError(f"size: value {size}; allowed: 1 or more")
    epoch, offset = divmod(position, size)
    return epoch, int(_permutation(size, seed, epoch)[offset]) if shuffle else offset


def position_before(position: int, size: int, seed: int, shuffle: bool) -> int | None:
    """The running position at which the prompt at `position` stood one epoch earlier; None in the first epoch.

    Raises ValueError as `prompt_index` does.
    """
    epoch, index = prompt_index(position, size, seed, shuffle)
    if not epoch:
        return None
    offset = int(np.flatnonzero(_permutation(size, seed, epoch - 1) == index)[0]) if shuffle else index
    return (epoch - 1) * size + offset


# Two, because the prompts of one iteration may come from two epochs.
@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # It sorts raw PCG64 words instead of using Generator.permutation: NumPy keeps the stream of a bit generator for
    # ever, those of Generator's methods only within a release (NEP 19), and a run must keep its order over upgrades.
    words = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order
