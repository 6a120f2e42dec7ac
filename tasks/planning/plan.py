"""The plan of an iteration as a pure function: which member of the crew starts with which groups."""


def assign_groups(num_groups: int, num_slots: int) -> tuple[tuple[int, ...], ...]:
    """Deal groups to slots in turn: slot s starts with groups s, s + num_slots, ...; sizes differ by at most one.

    A group stays whole, so that its prompt is prefilled once. Slots beyond the number of groups get nothing.
    """
    if num_groups < 1 or num_slots < 1:
        raise ValueError(f"{num_groups} groups on {num_slots} slots; allowed: at least one of each")
    return tuple(tuple(range(slot, num_groups, num_slots)) for slot in range(num_slots))
