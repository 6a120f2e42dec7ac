"""Which responses of a holder another member may take, by what the holder journalled."""

from storage.journal.assembly import JournalReader
from storage.journal.claims import Asks
from storage.journal.shard import Finish
from storage.stores.memory import MemoryStore
from tasks.sampling.session.candidates import candidates_of
from tasks.sampling.session.claimant import LOOKS_TO_ANSWER
from tests.claimants import IDLE, PLAN, a_claimant, numbers, say, seek
from tests.journals import Incarnation

FULL = "00000-full"


def with_tools(store):
    """A member of four responses: two run, the tool of the shortest runs, and one is not begun."""
    full = Incarnation(store, PLAN, 0, FULL)
    full.write(0, [1, 2, 3], Finish.RUNNING)
    full.write(1, [1], Finish.ACTING)
    full.write(4, [1, 2], Finish.RUNNING)
    return full


def test_a_response_whose_tool_runs_is_none_of_those_that_run():
    store = MemoryStore()
    full = with_tools(store)
    reader = JournalReader(store, PLAN)

    def found(*, acting):
        reader.refresh()
        return [(each.response, each.begun) for each in candidates_of(reader, FULL, "00001-me", acting=acting)]

    assert found(acting=False) == [(0, True), (4, True), (5, False)]
    assert found(acting=True) == [(0, True), (1, True), (4, True), (5, False)]
    full.write(4, [3])
    assert found(acting=False) == [(0, True), (5, False)]


def test_from_a_living_member_no_response_is_asked_for_or_taken_whose_tool_runs_and_from_a_lost_one_all_are():
    store = MemoryStore()
    with_tools(store)
    say(store, FULL, unfinished=4, running=3, plateau=1)
    me = a_claimant(store)
    me.take_own_slot()
    for _ in range(LOOKS_TO_ANSWER):
        assert seek(me, IDLE, me.owned()) == []
    assert Asks(store, 0).read(FULL) == (4,)
    # It has not answered.
    assert numbers(seek(me, IDLE, me.owned())) == [4]
    say(store, FULL, number=2, state="gone", unfinished=3)
    assert sorted(numbers(seek(me, IDLE, me.owned()))) == [0, 1, 5]
