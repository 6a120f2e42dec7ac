"""The balance of generation and training: one member more, or one fewer, keeps both about equally long.

After StreamRL's rule of run-time elasticity (arXiv 2504.15930, Algorithm 1). With delta = T_gen - T_train, and delta'
the generation time that one more member saves, a member is added if delta >= delta'. Generation is then still not
shorter than training, so the new member is fully used.
"""

from dataclasses import dataclass
from typing import Literal

# Without one member, generation must stay below the training time by this share, so that noise moves no member.
SLACK = 0.05


@dataclass(frozen=True, kw_only=True)
class BalanceStep:
    """change: members to add. delta_s: how much longer generation takes than training.

    saved_s: generation time that one more member saves; None if there is none to add.
    """

    change: Literal[-1, 0, 1]
    delta_s: float
    saved_s: float | None


def balance_step(
    generation_s: float, train_s: float, *, one_more_s: float | None, one_less_s: float | None
) -> BalanceStep:
    """Add a member if delta >= delta' > 0; remove one if generation would stay shorter than training without it.

    generation_s: the present time; one_more_s, one_less_s: the time with one member more or fewer; None: the bounds
    forbid it. If these are right, a change is never reversed: without an added member generation would be longer than
    training, and after a removal generation is still shorter than training.
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
