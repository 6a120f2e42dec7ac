"""What a claimant sees of the other members when it looks at their heartbeats."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from storage.stores.memory import MemoryStore
from tasks.crew_model.rebalance import LOOKS_MAX
from tests.claimants import IDLE, PLAN, a_claimant, look, nothing_left, say
from tests.journals import Incarnation, a_plan


def test_nothing_is_left_only_to_a_member_that_holds_nothing_itself_be_it_with_tools():
    store = MemoryStore()
    Incarnation(store, PLAN, 0, "00000-other")
    me = a_claimant(store)
    me.take_own_slot()
    say(store, "00000-other", unfinished=0)
    assert nothing_left(me, me.owned())
    _, seen = look(me, replace(IDLE, held=1), me.owned())
    assert not seen.nothing_left


def test_an_earlier_life_of_its_slot_that_died_a_moment_ago_has_no_room_for_what_a_member_cuts():
    store = MemoryStore()
    for name, slot in (("00000-other", 0), ("00001-before", 1)):
        Incarnation(store, PLAN, slot, name)
        say(store, name, state="working", slot=slot, unfinished=4, running=4, room=4)
    me = a_claimant(store)
    me.take_own_slot()
    _, seen = look(me, replace(IDLE, held=4, running=4, room=4), me.owned())
    assert [record.incarnation for record in seen.working] == ["00000-other"]


class Counting(MemoryStore):
    """Counts reads of heartbeats."""

    looks = 0

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.looks += "/alive/" in key
        return super().get(key, start, end)


@pytest.mark.slow
def test_a_look_reads_a_bounded_number_of_heartbeats():
    slots = 3 * LOOKS_MAX
    plan = a_plan(slots, 1, slots=slots)
    store = Counting()
    crew: Sequence[Incarnation] = [Incarnation(store, plan, slot, f"{slot:05d}-x") for slot in range(slots)]
    for member in crew:
        say(store, member.name, unfinished=1, running=1)
    me = a_claimant(store, f"{slots:05d}-joined", slot=slots, plan=plan)
    taken, seen = look(me, IDLE, {})
    assert not taken
    assert not seen.nothing_left
    assert store.looks == len(seen.holders) == LOOKS_MAX
    assert seen.unseen == slots - LOOKS_MAX
