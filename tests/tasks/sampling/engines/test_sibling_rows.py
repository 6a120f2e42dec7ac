"""Which rows draft for which, against a plain account of everything that came."""

import random
from collections import deque

import pytest

from tasks.sampling.engines.sibling_rows import NO_SCOPE, SiblingRows, scope_of


class Account:
    """What `SiblingRows` is to hold: the scope of each row, and when it was written."""

    def __init__(self, slots, ring):
        self.slots = [(NO_SCOPE, 0)] * slots
        self.ring = deque([(NO_SCOPE, 0)] * ring, maxlen=ring)
        self.ring_rows = deque(range(ring))
        self.time = 0

    def remember(self, scope):
        self.time += 1
        self.ring.append((scope, self.time))
        self.ring_rows.rotate(-1)
        return self.ring_rows[-1]

    def occupy(self, slot, scope):
        old, _ = self.slots[slot]
        saved = self.remember(old) if old != NO_SCOPE else None
        self.time += 1
        self.slots[slot] = (scope, self.time)
        return saved

    def candidates(self, slot, width):
        scope, _ = self.slots[slot]
        if scope == NO_SCOPE:
            return [-1] * width
        rows = [(time, row) for row, (other, time) in enumerate(self.slots) if other == scope and row != slot]
        ring = zip(self.ring_rows, self.ring, strict=True)
        rows += [(time, len(self.slots) + row) for row, (other, time) in ring if other == scope]
        found = [row for _, row in sorted(rows, reverse=True)][: width - 1]
        return [*found, slot, *[-1] * (width - 1 - len(found))]


@pytest.mark.parametrize("seed", range(20))
def test_candidates_are_the_newest_rows_of_the_scope_and_the_own_one(seed):
    rnd = random.Random(seed)
    slots, ring, width = rnd.randint(1, 6), rnd.randint(1, 6), rnd.choice((2, 4, 8))
    rows, account = SiblingRows(slots, ring, width), Account(slots, ring)
    for _ in range(120):
        scope = rnd.choice((NO_SCOPE, 11, 12, -13))
        if rnd.random() < 0.5:
            slot = rnd.randrange(slots)
            assert rows.occupy(slot, scope) == account.occupy(slot, scope)
        else:
            assert rows.remember(scope) == account.remember(scope)
        assert rows.candidates.tolist() == [account.candidates(slot, width) for slot in range(slots)]
        assert rows.is_changed
    # No scope that has gone is kept, and the ring has not grown.
    assert set(rows._rows) == {scope for scope, _ in [*account.slots, *account.ring]} - {NO_SCOPE}
    assert rows.candidates.max() < slots + ring


def test_the_scope_of_a_prompt_is_a_signed_64_bit_integer_and_never_none():
    scopes = {scope_of((token, other)) for token in range(40) for other in range(40)}
    assert len(scopes) == 1600
    assert NO_SCOPE not in scopes
    assert all(-(1 << 63) <= scope < 1 << 63 for scope in scopes)
    assert scope_of([5, 6]) == scope_of((5, 6))
