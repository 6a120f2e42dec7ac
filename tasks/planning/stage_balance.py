"""The balance of generation and training: a member more, or a member fewer, keeps both about equally long.

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
    """The decision of one balance step.

    Attributes:
        change: members to add; -1 removes a member.
        delta_s: seconds by which generation is longer than training.
        saved_s: seconds of generation that one more member saves; None if no member can be added.
    """

    change: Literal[-1, 0, 1]
    delta_s: float
    saved_s: float | None


def balance_step(
    generation_s: float, train_s: float, *, one_more_s: float | None, one_less_s: float | None
) -> BalanceStep:
    """Add a member if delta >= delta' > 0; remove one if generation would stay shorter than training without it.

    If the given times are right, no later step reverses a change: without an added member generation would be longer
    than training, and after a removal generation is still shorter than training. Raises ValueError for negative or
    infinite times, and for training of 0 seconds.

    Args:
        generation_s: seconds of generation with the present members.
        train_s: seconds of training.
        one_more_s: seconds of generation with one member more; None if the bounds forbid the member.
        one_less_s: seconds of generation with one member fewer; None if the bounds forbid the removal.
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
