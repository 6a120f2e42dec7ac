"""One member more, or one less: generation kept about as long as training.

After StreamRL's rule of run-time elasticity (arXiv 2504.15930, Algorithm 1): with delta = T_gen - T_train, and delta'
the generation time that one more member saves, one is added when delta >= delta'. Then generation is still not shorter
than training, so that the new member is used wholly.
"""

from dataclasses import dataclass
from typing import Literal

# What one member less would take must be below the training time by this share, so that noise takes nobody to and fro.
SLACK = 0.05


@dataclass(frozen=True, kw_only=True)
class BalanceStep:
    """change: members more. delta_s: how much longer generation takes than training.

    saved_s: of generation by one member more; None where there is none to be had.
    """

    change: Literal[-1, 0, 1]
    delta_s: float
    saved_s: float | None


def balance_step(
    generation_s: float, train_s: float, *, one_more_s: float | None, one_less_s: float | None
) -> BalanceStep:
    """Add a member when delta >= delta' > 0; remove one when generation would stay shorter than training without it.

    generation_s: as it is; one_more_s, one_less_s: as it would be; None: the bounds allow none. Where these are right
    it never turns back: after one was added, removing it would make generation longer than training, and after one was
    removed, generation is shorter than training.
    """
    if not 0 <= generation_s < float("inf") or not 0 < train_s < float("inf"):
        raise ValueError(f"generation_s, train_s: {generation_s}, {train_s}; allowed: finite, training above 0")
    delta_s = generation_s - train_s
    saved_s = None if one_more_s is None else generation_s - one_more_s
    change: Literal[-1, 0, 1] = 0
    if saved_s is not None and delta_s >= saved_s > 0:
        change = 1
    elif one_less_s is not None and max(generation_s, one_less_s) <= (1 - SLACK) * train_s:
        change = -1
    return BalanceStep(change=change, delta_s=delta_s, saved_s=saved_s)
