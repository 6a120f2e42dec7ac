"""What a scorer reads of the members' journals: the groups that have ended, and as few shards as tell of them."""

import pytest

from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.records import ClaimRecord
from storage.stores.memory import MemoryStore
from tasks.configuration.rollout import RolloutConfig
from tasks.learning.arrivals import ASKED_AT_EVERY_LOOK
from tasks.learning.ended_groups import EndedGroups
from tests.journals import Incarnation, a_plan

DEAD = 20


class Counted(MemoryStore):
    """Remembers whose shards were asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def get(self, key, start=0, end=None):
        if layout.journal(0) in key:
            self.asked.append(key.split("/")[-2])
        return super().get(key, start, end)


@pytest.fixture
def store():
    return Counted()


def looked(store, ended, now_s=0.0):
    """Whose shards a look asks for."""
    store.asked.clear()
    ended.look(now_s)
    return set(store.asked)


def test_the_dead_are_asked_once(store):
    plan = a_plan(groups=2, generations=2)
    ended = EndedGroups(store, plan, RolloutConfig())
    names = [f"00000-{life:02d}" for life in range(DEAD)]
    for name in names:
        Incarnation(store, plan, 0, name).write(0, [7], Finish.RUNNING)
    assert looked(store, ended) == set(names)
    assert looked(store, ended) == {names[-1]}


def test_a_member_with_no_unended_response_is_not_asked(store):
    plan = a_plan(groups=2, generations=2, slots=2)
    ended = EndedGroups(store, plan, RolloutConfig())
    first, second = (Incarnation(store, plan, slot, f"0000{slot}-a") for slot in (0, 1))
    first.write(0, [3, 4])
    first.write(1, [5])
    looked(store, ended)
    assert looked(store, ended) == {second.name}
    second.write(2, [6])
    second.write(3, [7, 8])
    looked(store, ended)
    assert looked(store, ended) == set()
    assert [graded.length for group in (0, 1) for graded in ended.named(group).responses] == [2, 1, 1, 2]


def test_an_end_that_a_claim_voids_is_followed_to_the_next_owner(store):
    plan = a_plan(groups=1, generations=2)
    ended = EndedGroups(store, plan, RolloutConfig())
    first = Incarnation(store, plan, 0, "00000-a")
    first.write(0, [3])
    first.write(1, [4])
    ended.look(0.0)
    assert [graded.length for graded in ended.named(0).responses] == [1, 1]
    # The claim was under way while the second shard was written, which the claim does not seal.
    late = ClaimRecord(unit=0, epoch=2, incarnation="00000-b", slot=0, responses=None, sealed={first.name: 0})
    records.commit(store, layout.claim(0, 0, 2), late)
    ended.look(0.0)
    assert ended.named(0) is None
    Incarnation(store, plan, 0, "00000-c").write(1, [5, 6])
    ended.look(0.0)
    assert [graded.length for graded in ended.named(0).responses] == [1, 2]


def test_a_large_crew_is_asked_when_its_shards_are_due(store):
    crew = ASKED_AT_EVERY_LOOK + 1
    plan = a_plan(groups=crew, generations=1, slots=crew)
    rollout = RolloutConfig()
    ended = EndedGroups(store, plan, rollout)
    members = [Incarnation(store, plan, slot, f"{slot:05d}-a") for slot in range(crew)]
    for member, slot in zip(members, range(crew), strict=True):
        member.write(slot, [7], Finish.RUNNING)
    assert len(looked(store, ended)) == crew
    assert looked(store, ended, rollout.poll_interval_s) == set()
    assert len(looked(store, ended, rollout.flush_interval_s)) == crew
