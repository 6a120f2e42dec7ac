"""Taking over, stealing and sharing, claim by claim, from journals written by hand."""

import pytest

from storage.clock import ManualClock
from storage.journal.assembly import JournalReader
from storage.journal.claims import AskRecord, Asks
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.records import ClosedRecord
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreUnavailable
from tasks.crew_model.rebalance import Seeker, Transfers
from tasks.sampling.session.claimant import LOOKS_TO_ANSWER, SHARDS_A_CALL
from tests.claimants import IDLE, PLAN, TTL_S, a_claimant, nothing_left, numbers, owners, say, seek
from tests.journals import Incarnation


def test_a_slot_that_comes_again_takes_nothing_else_of_the_units_it_had_helped():
    store = MemoryStore()
    helper = a_claimant(store, "00000-before", slot=0)
    helper.take_own_slot()
    [item] = seek(helper, Seeker(room=1, running=0), helper.owned())
    again = a_claimant(store, "00000-again", slot=0)
    assert set(numbers(again.take_own_slot())) == {0, 1, 4, 5, item.response}
    owner = a_claimant(store, "00001-own")
    assert set(numbers(owner.take_own_slot())) == {2, 3, 6, 7} - {item.response}


def test_a_slot_takes_its_own_unit_and_what_its_predecessors_held_elsewhere():
    store = MemoryStore()
    Incarnation(store, PLAN, 1, "00001-before").write(2, [7, 8], Finish.RUNNING)
    elsewhere = a_claimant(store, "00001-before2")
    elsewhere.take_own_slot()
    assert numbers(seek(elsewhere, IDLE, elsewhere.owned())) == [0, 1, 4, 5]
    me = a_claimant(store)
    work = me.take_own_slot()
    assert numbers(work) == [2, 3, 6, 7, 0, 1, 4, 5]
    assert work[0].prefix == (7, 8)
    assert me.tokens_recovered == 2
    assert owners(store) == ["00001-me"] * 8


def test_nobodys_responses_are_taken_at_once_and_a_slot_that_comes_later_takes_the_rest():
    store = MemoryStore()
    joined = a_claimant(store, "00002-joined", slot=2)
    assert joined.take_own_slot() == ()
    taken = numbers(seek(joined, Seeker(room=3, running=0), {}))
    assert len(taken) == 3
    late = a_claimant(store, "00000-late", slot=0)
    assert numbers(late.take_own_slot()) == [response for response in (0, 1, 4, 5) if response not in taken]
    assert {response for response, name in enumerate(owners(store)) if name == "00002-joined"} == set(taken)


def test_who_is_silent_for_the_ttl_is_succeeded_from_where_its_journal_ends():
    store, clock = MemoryStore(), ManualClock()
    dead = Incarnation(store, PLAN, 0, "00000-dead")
    dead.write(0, [1, 2, 3])
    dead.write(1, [4, 5], Finish.RUNNING)
    say(store, "00000-dead", unfinished=3, running=3)
    me = a_claimant(store, clock=clock)
    me.take_own_slot()
    mine = me.owned()
    assert not nothing_left(me, mine)
    clock.advance(TTL_S)
    work = seek(me, IDLE, mine)
    assert numbers(work) == [1, 4, 5]
    assert work[0].prefix == (4, 5)
    dead.write(1, [9, 9], Finish.STOP)  # a zombie: void
    reader = JournalReader(store, PLAN)
    reader.refresh()
    assert reader.assemble(1).token_ids.tolist() == [4, 5]
    assert reader.assemble(0).finish == Finish.STOP


class SlowJournal(MemoryStore):
    """Its next read of a journal takes `slow_s` on the clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock, self.slow_s = clock, 0.0

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if key.startswith(layout.journal(0)):
            self.clock.advance(self.slow_s)
            self.slow_s = 0.0
        return super().get(key, start, end)


@pytest.mark.parametrize(("slow_s", "taken"), [(0.9 * TTL_S, [1, 4, 5]), (1.1 * TTL_S, [])])
def test_what_a_look_showed_long_ago_is_no_reason_to_take(slow_s, taken):
    """While a request hangs, a holder that was suspended may have come back."""
    clock = ManualClock()
    store = SlowJournal(clock)
    suspended = Incarnation(store, PLAN, 0, "00000-suspended")
    suspended.write(0, [1, 2, 3])
    suspended.write(1, [4, 5], Finish.RUNNING)
    say(store, "00000-suspended", unfinished=3, running=3)
    me = a_claimant(store, clock=clock)
    me.take_own_slot()
    mine = me.owned()
    assert not nothing_left(me, mine)
    clock.advance(TTL_S)
    store.slow_s = slow_s
    assert numbers(seek(me, IDLE, mine)) == taken
    say(store, "00000-suspended", number=2, unfinished=3, running=3)
    if not taken:
        assert numbers(seek(me, IDLE, mine)) == []


def test_a_long_journal_is_read_in_parts_and_what_it_holds_is_taken_then():
    clock = ManualClock()
    store = MemoryStore()
    gone = Incarnation(store, PLAN, 0, "00000-gone")
    for token in range(2 * SHARDS_A_CALL + 1):
        gone.write(0, [token], Finish.RUNNING)
    say(store, "00000-gone", state="gone")
    me = a_claimant(store, clock=clock)
    me.take_own_slot()
    me.refresh()
    parts = 0
    while (seen := me.look(me.owned(), held=0, released=0)) is None:
        parts += 1
    assert parts == 2
    transfer = Transfers(IDLE, seen.holders, seen.unclaimed).next()
    gone.write(0, [7], Finish.RUNNING)  # a late flush does not begin the reading again
    work = me.take(transfer).work
    assert {item.response: len(item.prefix) for item in work}[0] == 2 * SHARDS_A_CALL + 2


def test_the_journals_of_earlier_holders_are_read_in_parts_as_well():
    store = MemoryStore()
    first = Incarnation(store, PLAN, 0, "00000-first")
    for token in range(2 * SHARDS_A_CALL + 1):
        first.write(0, [token], Finish.RUNNING)
    say(store, "00000-first", state="gone")
    second = a_claimant(store, "00001-second")
    second.take_own_slot()
    second.refresh()
    while second.look(second.owned(), held=0, released=0) is None:
        pass
    assert 0 in numbers(seek(second, IDLE, second.owned()))
    say(store, "00001-second", state="gone")
    me = a_claimant(store, "00007-me", slot=7)
    me.take_own_slot()
    me.refresh()
    seen = me.look(me.owned(), held=0, released=0)
    transfer = Transfers(IDLE, seen.holders, seen.unclaimed).next()
    assert transfer.incarnation == "00001-second"
    parts = 0
    while (found := me.take(transfer)) is None:
        parts += 1
    assert parts == 2
    assert {item.response: len(item.prefix) for item in found.work}[0] == 2 * SHARDS_A_CALL + 1


def test_a_beat_that_goes_on_keeps_what_is_held():
    store, clock = MemoryStore(), ManualClock()
    Incarnation(store, PLAN, 0, "00000-slow").write(0, [1], Finish.RUNNING)
    me = a_claimant(store, clock=clock)
    me.take_own_slot()
    mine = me.owned()
    for number in range(1, 10):
        say(store, "00000-slow", number, unfinished=4, running=4)
        assert seek(me, IDLE, mine) == []
        clock.advance(TTL_S - 1)


def test_gone_and_released_need_no_wait():
    store = MemoryStore()
    leaver = Incarnation(store, PLAN, 0, "00000-leaver")
    leaver.write(4, [1, 2], Finish.RELEASED)
    say(store, "00000-leaver", unfinished=4, running=3, released=1)
    me = a_claimant(store)
    me.take_own_slot()
    mine = me.owned()
    [item] = seek(me, IDLE, mine)
    assert (item.response, item.prefix) == (4, (1, 2))
    say(store, "00000-leaver", 2, state="gone", unfinished=3)
    assert numbers(seek(me, IDLE, me.owned())) == [0, 1, 5]


def test_what_it_released_itself_it_may_take_again():
    store = MemoryStore()
    me = Incarnation(store, PLAN, 0, "00000-me")
    me.write(0, [1, 2], Finish.RELEASED)
    claimant = a_claimant(store, "00000-me", slot=0)
    [item] = seek(claimant, Seeker(room=1, running=0), dict.fromkeys((0, 1, 4, 5), 1), released=1)
    assert item.response in (0, 2, 3, 6, 7)
    taken = seek(claimant, IDLE, claimant.owned(), released=1)
    assert 0 in [item.response, *numbers(taken)]
    released = next(work for work in [item, *taken] if work.response == 0)
    assert released.prefix == (1, 2)


def test_unstarted_work_of_the_living_is_halved_and_never_taken_back():
    store = MemoryStore()
    full = Incarnation(store, PLAN, 0, "00000-full")
    full.write(0, [1], Finish.RUNNING)
    say(store, "00000-full", unfinished=4, running=1, waiting=3)
    me = a_claimant(store)
    me.take_own_slot()
    mine = me.owned()
    work = seek(me, IDLE, mine)
    assert numbers(work) == [5, 4]
    say(store, "00001-me", unfinished=4 + 2, waiting=6)
    back = a_claimant(store, "00000-full", slot=0)
    assert set(numbers(seek(back, IDLE, dict.fromkeys((0, 1), 1)))) <= {2, 3, 6, 7}


def test_of_what_runs_that_with_the_shortest_prefixes_is_asked_for():
    store = MemoryStore()
    full = Incarnation(store, PLAN, 0, "00000-full")
    for response, tokens in ((0, [1, 2]), (1, [1, 2]), (4, [1] * 14), (5, [1] * 15)):
        full.write(response, tokens, Finish.RUNNING)
    say(store, "00000-full", unfinished=4, running=4, plateau=2)
    me = a_claimant(store)
    me.take_own_slot()
    for _ in range(LOOKS_TO_ANSWER):
        assert seek(me, Seeker(room=8, running=0), me.owned()) == []
    assert sorted(Asks(store, 0).read("00000-full")) == [0, 1]
    # It has not answered.
    work = seek(me, Seeker(room=8, running=0), me.owned())
    assert sorted(numbers(work)) == [0, 1]


def test_what_a_holder_releases_when_it_is_asked_is_taken_with_its_last_token():
    store = MemoryStore()
    full = Incarnation(store, PLAN, 0, "00000-full")
    for response in (0, 1, 4, 5):
        full.write(response, [1, 2], Finish.RUNNING)
    say(store, "00000-full", unfinished=4, running=4, plateau=2)
    me = a_claimant(store)
    me.take_own_slot()
    assert seek(me, IDLE, me.owned()) == []
    asked = Asks(store, 0).read("00000-full")
    for response in asked:
        full.write(response, [3], Finish.RELEASED)
    say(store, "00000-full", number=2, unfinished=4, running=2, released=2, plateau=2)
    work = seek(me, IDLE, me.owned())
    assert {item.response: item.prefix for item in work} == dict.fromkeys(asked, (1, 2, 3))


def test_an_ask_of_another_form_is_passed_over():
    store = MemoryStore()
    asks = Asks(store, 0)
    asks.write("00000-a", AskRecord(asker="00001-b", responses=(1,)))
    store.put(layout.ask(0, "00000-a", 1), b"{}")
    Asks(store, 0).write("00000-a", AskRecord(asker="00002-c", responses=(2, 3)))
    reader = Asks(store, 0)
    assert reader.read("00000-a") == (1, 2, 3)
    assert reader.read("00000-a") == ()


def test_two_that_seek_at_once_never_hold_the_same_response():
    store = MemoryStore()
    Incarnation(store, PLAN, 0, "00000-gone").write(0, [1], Finish.RUNNING)
    say(store, "00000-gone", state="gone", unfinished=4)
    first = a_claimant(store, "00001-first")
    second = a_claimant(store, "00002-second", slot=2)
    first.take_own_slot()
    first_mine = first.owned()
    create, raced = store.create, []

    def others_first(key, body):
        if "/claims/" in key and not raced:
            raced.append(key)
            raced.extend(numbers(seek(second, IDLE, {})))
        return create(key, body)

    store.create = others_first
    won = numbers(seek(first, IDLE, first_mine))
    assert won == []
    assert sorted(raced[1:]) == [0, 1, 4, 5]
    assert owners(store) == [
        "00002-second" if response in (0, 1, 4, 5) else "00001-first" for response in range(PLAN.num_responses)
    ]


def test_a_claim_whose_answer_was_lost_with_what_followed_is_found_again():
    store = MemoryStore()
    me = a_claimant(store, "00002-joined", slot=2)
    create = store.create

    def cut_off(key, body):
        create(key, body)
        store.get = unreachable
        raise StoreUnavailable("no answer")

    def unreachable(key, start=0, end=None):
        raise StoreUnavailable("no answer")

    store.create = cut_off
    with pytest.raises(StoreUnavailable):
        seek(me, IDLE, {})
    del store.create, store.get
    assert len(owners(store)) - owners(store).count(None) > 0
    found = seek(me, IDLE, {})
    assert {response for response, name in enumerate(owners(store)) if name} == set(numbers(found))


def test_a_heartbeat_older_than_a_claim_says_nothing_of_what_it_took():
    store = MemoryStore()
    say(store, "00000-new", claims=0)
    Incarnation(store, PLAN, 0, "00000-new")
    me = a_claimant(store)
    me.take_own_slot()
    assert not nothing_left(me, me.owned())


def test_nothing_is_left_when_every_holder_says_so_and_nobody_waits():
    store = MemoryStore()
    other = Incarnation(store, PLAN, 0, "00000-other")
    me = a_claimant(store)
    me.take_own_slot()
    mine = me.owned()
    say(store, "00000-other", unfinished=1, running=1)
    assert not nothing_left(me, mine)
    assert me.own_unit_ended(me.owned())  # of what others hold of it: nothing
    for response in (0, 1, 4, 5):
        other.write(response, [1])
    say(store, "00000-other", 2)
    assert nothing_left(me, mine)


def test_its_own_unit_has_ended_when_those_who_took_it_have_ended_it():
    store = MemoryStore()
    me = a_claimant(store)
    thief = Incarnation(store, PLAN, 1, "00001-twin")
    me.probe([2])
    for response in (2, 3, 6):
        thief.write(response, [1])
    assert not me.own_unit_ended(me.owned())
    thief.write(7, [1])
    assert me.own_unit_ended(me.owned())


def test_what_it_has_claimed_and_does_not_hold_has_not_ended():
    store = MemoryStore()
    me = a_claimant(store)
    me.take_own_slot()
    assert me.own_unit_ended(me.owned())
    lost = me.owned()
    del lost[6]
    assert not me.own_unit_ended(lost)


def test_an_iteration_is_closed_by_the_trainer():
    store = MemoryStore()
    me = a_claimant(store)
    assert not me.closed()
    records.commit(store, layout.closed(0), ClosedRecord(iteration=0, reason="done"))
    assert me.closed()


def test_what_a_living_member_took_with_an_answer_owed_is_at_its_tools_and_not_unstarted():
    store = MemoryStore()
    dead = Incarnation(store, PLAN, 0, "00000-dead")
    dead.write(4, [1], Finish.ACTING)
    dead.write(5, [1], Finish.ACTING)
    Incarnation(store, PLAN, 0, "00000-full")
    say(store, "00000-full", claims=2, unfinished=4, running=0, waiting=4)
    me = a_claimant(store)
    me.take_own_slot()
    assert sorted(numbers(seek(me, IDLE, me.owned()))) == [0, 1]
    say(store, "00000-full", number=2, claims=3, state="gone", unfinished=2)
    assert sorted(numbers(seek(me, IDLE, me.owned()))) == [4, 5]
