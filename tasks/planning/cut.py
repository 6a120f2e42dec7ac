"""When a member that has ended most of its responses hands the others over, and leaves.

After RLHFless (arXiv 2602.22718, section 4.3, step 4): each member decides for itself, when a share tau of its
responses has ended and other running members have free slots for all that are left.
"""

from collections.abc import Collection


def should_cut(ended: int, total: int, unfinished: int, rooms_of_others: Collection[int], share: float | None) -> bool:
    """Whether a member hands over all `unfinished` responses that it holds.

    ended, total: among the responses it was planned for. rooms_of_others: for each of the other running members, how
    many responses it could begin besides its own. share: tau; None: never. All must fit, because one that stays keeps
    the machine, too.
    """
    if not 0 <= ended <= total:
        raise ValueError(f"ended: {ended} given; allowed: 0 to total ({total})")
    if share is None or not total or not unfinished:
        return False
    return ended / total >= share and unfinished <= sum(max(0, room) for room in rooms_of_others)
