"""Locality: gives the longest work to the member that is nearest to the trainer.

RLHFless (arXiv 2602.22718, section 4.5) places the actor with the longest work beside the learner. Its inequality for
the others also counts the KV cache that they fetch; here none is moved, and no member is excluded. A member's reach is
the time that it needs before it decodes: its start, the weights and the journal over its link. Each member prefills
for itself.
"""

from collections import defaultdict
from collections.abc import Sequence

from tasks.planning.dispatch import Assignment, Member


def longest_nearest(
    members: Sequence[Member], assignments: Sequence[Assignment], losses_per_h: Sequence[float], *, same_price: bool
) -> tuple[Assignment, ...]:
    """Exchange assignments among members of equal speed: the longer, the nearer; if equally near, the fewer losses.

    Pairing the longest work with the shortest reach gives the smallest latest end of all pairings, so the makespan
    never grows. same_price: exchange only among members of the same price, so that the dollars do not grow either.
    Time-limited members keep their assignments.
    """
    classes = defaultdict(list)
    for index, member in enumerate(members):
        if member.window_s is None:
            price = member.usd_per_h if same_price else 0.0
            classes[member.step_time, member.responses_max, price].append(index)
    placed = list(assignments)
    for alike in classes.values():
        reach = {index: (members[index].start_s, losses_per_h[index]) for index in alike}
        if len(set(reach.values())) > 1:
            nearest_first = sorted(alike, key=reach.__getitem__)
            longest_first = sorted(alike, key=lambda index: -decode_s(members[index], assignments[index]))
            for to, taken in zip(nearest_first, longest_first, strict=True):
                placed[to] = _moved(assignments[taken], members[taken], members[to])
    return tuple(placed)


def decode_s(member: Member, assignment: Assignment) -> float:
    """Seconds that a member works on its assignment after its start; 0 without one."""
    return assignment.ends_s - member.start_s if assignment.groups else 0.0


def _moved(assignment: Assignment, before: Member, after: Member) -> Assignment:
    ends_s = after.start_s + decode_s(before, assignment) if assignment.groups else assignment.ends_s
    return Assignment(groups=assignment.groups, batch_max=assignment.batch_max, ends_s=ends_s)
