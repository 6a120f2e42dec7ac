"""Elementary rules of planning: the number of groups within a sampling budget, and assigning groups to slots in turn.

No rule here needs lengths or machines.
"""

import math
from fractions import Fraction


def groups_in_budget(num_wanted: int, budget: float) -> int:
    """The number of groups to plan so that `num_wanted` can be trained: `num_wanted` times the budget, rounded up.

    The budget counts as the decimal in the configuration: 10 groups at 1.1 are 11, although the float is slightly
    larger.
    """
    if num_wanted < 1 or budget < 1:
        raise ValueError(f"{num_wanted} groups wanted, budget {budget}; allowed: at least 1 each")
    return math.ceil(num_wanted * Fraction(repr(budget)))


def assign_groups(num_groups: int, num_slots: int) -> tuple[tuple[int, ...], ...]:
    """Assign groups to slots in turn: slot s starts with groups s, s + num_slots, ...; sizes differ by at most one.

    A group stays whole, so a member prefills the prompt once. Slots beyond the number of groups get nothing. Every slot
    starts with its lowest group numbers, because training takes low numbers first.
    """
    if num_groups < 1 or num_slots < 1:
        raise ValueError(f"{num_groups} groups on {num_slots} slots; allowed: at least one of each")
    return tuple(tuple(range(slot, num_groups, num_slots)) for slot in range(num_slots))
