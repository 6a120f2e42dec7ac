"""Waiting for groups while their responses are being written, on a clock that lets things happen while it sleeps."""

import logging

import pytest

from storage.clock import ManualClock
from storage.journal.assembly import JournalReader
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.records import ClaimRecord
from storage.stores.memory import MemoryStore
from tasks.learning.journal_follower import FollowConfig, GroupFollower, GroupTimeout, RecordedElsewhereError
from tests.journals import Incarnation, a_plan

PLAN = a_plan(groups=4, generations=2, slots=2)  # slot 0 has groups 0 and 2, slot 1 has 1 and 3
EVERY = [0, 1, 2, 3]


class Meanwhile(ManualClock):
    """While it is slept on, the next of `events` happens."""

    def __init__(self, *events):
        super().__init__()
        self.events = list(events)

    def sleep(self, duration_s):
        super().sleep(duration_s)
        if self.events:
            self.events.pop(0)()


class Counted(MemoryStore):
    """Remembers whose shards were asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def get(self, key, start=0, end=None):
        if "/journal/" in key:
            self.asked.append(key.split("/")[-2])
        return super().get(key, start, end)


def follower(store, clock, *, in_plan_order=True, timeout_s=10.0):
    config = FollowConfig(in_plan_order=in_plan_order, timeout_s=timeout_s, poll_interval_s=1.0, flush_interval_s=5.0)
    return GroupFollower(JournalReader(store, PLAN), PLAN, config, clock)


def finish_group(incarnation, group):
    for response in (2 * group, 2 * group + 1):
        incarnation.write(response, [response, 7, 9])


@pytest.fixture
def store():
    return Counted()


@pytest.fixture
def crew(store):
    return [Incarnation(store, PLAN, slot, f"0000{slot}-a") for slot in (0, 1)]


def test_a_finished_group_is_found_without_waiting(store, crew):
    finish_group(crew[0], 0)
    clock = ManualClock()
    following = follower(store, clock)
    assert following.wait(EVERY) == 0
    assert clock.monotonic() == following.waited_s == 0
    assert following.response(1).token_ids.tolist() == [1, 7, 9]


def test_in_plan_order_the_first_pending_group_is_waited_for_whatever_else_is_finished(store, crew):
    finish_group(crew[0], 2)
    clock = Meanwhile(lambda: finish_group(crew[1], 1), lambda: finish_group(crew[0], 0))
    following = follower(store, clock)
    assert [following.wait(EVERY[n:]) for n in range(3)] == [0, 1, 2]
    assert clock.monotonic() == following.waited_s == 2


def test_in_order_of_arrival_whatever_is_finished_comes_first(store, crew):
    clock = Meanwhile(lambda: finish_group(crew[1], 3), lambda: finish_group(crew[0], 0))
    following = follower(store, clock, in_plan_order=False)
    assert following.wait(EVERY) == 3
    assert following.wait([0, 1, 2]) == 0


def test_half_a_group_is_not_a_group(store, crew):
    crew[0].write(0, [1, 2])
    crew[0].write(1, [1, 2], Finish.RUNNING)
    assert not follower(store, ManualClock()).is_finished(0)
    with pytest.raises(GroupTimeout):
        follower(store, ManualClock()).wait(EVERY)


def test_tokens_of_any_response_put_the_time_limit_off(store, crew):
    slow = [lambda: None, lambda: None, lambda: crew[1].write(2, [5], Finish.RUNNING)] * 5
    clock = Meanwhile(*slow, lambda: finish_group(crew[0], 0))
    assert follower(store, clock, timeout_s=3.5).wait(EVERY) == 0
    assert clock.monotonic() == 16


def test_signs_of_life_without_tokens_do_not_put_it_off(store, crew):
    def beat():
        crew[0].announce(started_at_s=0, updated_at_s=1, tokens_generated=0, gone=False)

    clock = Meanwhile(*[beat] * 20)
    with pytest.raises(GroupTimeout):
        follower(store, clock, timeout_s=5.0).wait(EVERY)
    assert clock.monotonic() == pytest.approx(6.0)


def test_the_time_limit_names_the_responses_their_tokens_and_their_holders(store):
    slot = Incarnation(store, PLAN, 0, "00000-a")
    slot.write(0, [1, 2, 3], Finish.RUNNING)
    slot.write(1, [4])
    with pytest.raises(GroupTimeout) as caught:
        follower(store, ManualClock(), in_plan_order=False).wait([0, 1])
    assert str(caught.value).splitlines() == [
        "iteration 0: nothing was journalled for 10 s; waiting for",
        "  response 0 (group 0): 3 tokens, held by 00000-a",
        "  response 2 (group 1): 0 tokens, not claimed",
        "  response 3 (group 1): 0 tokens, not claimed",
    ]


def test_a_long_list_of_what_is_missing_is_cut(store):
    with pytest.raises(GroupTimeout, match=r"response 5 \(group 2\).*\n  and 2 more$"):
        follower(store, ManualClock(), in_plan_order=False).wait(EVERY)


def test_the_end_that_a_zombie_writes_does_not_finish_a_response(store, crew):
    zombie, successor = crew[0], Incarnation(store, PLAN, 0, "00000-b")
    finish_group(zombie, 0)
    following = follower(store, ManualClock())
    with pytest.raises(GroupTimeout, match=r"response 0 \(group 0\): 0 tokens, held by 00000-b"):
        following.wait(EVERY)
    successor.write(0, [8])
    successor.write(1, [8])
    assert following.wait(EVERY) == 0
    assert following.response(0).token_ids.tolist() == [8]
    assert [span.incarnation for span in following.response(0).lineage] == ["00000-b"]


def test_the_tokens_of_a_released_group_are_dropped(store, crew):
    finish_group(crew[0], 0)
    following = follower(store, ManualClock())
    following.wait(EVERY)
    following.release(0)
    assert following.is_finished(0)
    with pytest.raises(KeyError):
        following.response(0)


def test_a_damaged_shard_is_named_and_not_waited_for(store, crew):
    finish_group(crew[0], 0)
    key = layout.shard(0, crew[0].name, 0)
    store.put(key, store.get(key)[:-1])
    with pytest.raises(ValueError, match=rf"object '{key}' is corrupt"):
        follower(store, ManualClock()).wait(EVERY)


def asked_in_vain(store, following, pending):
    """Whose shards one wait that ends at its first look asked for."""
    store.asked.clear()
    with pytest.raises(GroupTimeout):
        following.wait(pending)
    return store.asked


def test_the_dead_and_the_done_are_not_read_again(store, crew):
    crew[0].write(0, [1, 2], Finish.RUNNING)
    Incarnation(store, PLAN, 0, "00000-b")
    for group in (1, 3):
        finish_group(crew[1], group)
    following = follower(store, ManualClock(), in_plan_order=False, timeout_s=-1.0)
    assert following.wait(EVERY) == 1
    assert asked_in_vain(store, following, [0, 2]) == ["00000-b"]


def test_whoever_holds_nothing_that_is_pending_is_not_read(store, crew):
    following = follower(store, ManualClock(), in_plan_order=False, timeout_s=-1.0)
    assert asked_in_vain(store, following, [1, 3]) == ["00001-a"]
    assert sorted(asked_in_vain(store, following, EVERY)) == ["00000-a", "00001-a"]


def test_in_plan_order_those_who_hold_a_later_group_are_read_too(store, crew):
    following = follower(store, ManualClock(), timeout_s=-1.0)
    assert sorted(asked_in_vain(store, following, EVERY)) == ["00000-a", "00001-a"]


def test_an_end_below_a_seal_is_read_from_the_dead(store):
    """The successor has nothing left to write, so nothing else would tell that the group is finished."""
    finish_group(Incarnation(store, PLAN, 0, "00000-a"), 0)
    Incarnation(store, PLAN, 0, "00000-b")
    clock = ManualClock()
    assert follower(store, clock).wait(EVERY) == 0
    assert clock.monotonic() == 0


def test_a_seal_beyond_what_was_read_is_read_up_to(store, crew):
    def end_and_be_succeeded():
        crew[0].write(0, [2])
        claim = ClaimRecord(unit=0, epoch=2, incarnation="00000-b", slot=0, responses=None, sealed={"00000-a": 1})
        records.commit(store, layout.claim(0, 0, 2), claim)

    crew[0].write(0, [1], Finish.RUNNING)
    following = follower(store, Meanwhile(end_and_be_succeeded))
    with pytest.raises(GroupTimeout, match=r"waiting for\n  response 1 \(group 0\): 0 tokens, held by 00000-b$"):
        following.wait([0])


def test_while_it_waits_it_says_for_what_but_not_often(store, crew, caplog):
    caplog.set_level(logging.WARNING, logger="tasks.learning.journal_follower")
    crew[0].write(0, [1, 2, 3], Finish.RUNNING)
    idle = [lambda: None] * 69
    following = follower(store, Meanwhile(*idle, lambda: finish_group(crew[1], 1)), in_plan_order=False, timeout_s=99)
    assert following.wait([0, 1]) == 1
    assert caplog.messages == [
        f"iteration 0: nothing new for {still_s} s; waiting until 1970-01-01 00:01:39 UTC (trainer.group_timeout_s) "
        "for response 0 (group 0): 3 tokens, held by 00000-a; "
        "response 1 (group 0): 0 tokens, held by 00000-a; response 2 (group 1): 0 tokens, held by 00001-a; "
        "response 3 (group 1): 0 tokens, held by 00001-a"
        for still_s in (10, 40)
    ]


def test_a_pods_log_says_what_is_waited_for_as_long_as_it_is(store, crew):
    """Groups by their number while some come, and responses by name while none does."""
    clock, said = Meanwhile(), []
    following = follower(store, clock, in_plan_order=False, timeout_s=99)
    assert following.in_words() == "0 of 8 responses have ended, with 0 tokens; waits for 4 groups"
    quiet = [lambda: said.append(following.in_words())] * 12
    clock.events = [
        *quiet,
        lambda: crew[0].write(0, [5, 7, 9]),
        *quiet[:2],
        lambda: crew[0].write(1, [5]),
    ]
    assert following.wait([0]) == 0
    assert said[8] == said[0] == "0 of 8 responses have ended, with 0 tokens; waits for 4 groups"
    assert said[11] == (
        "0 of 8 responses have ended, with 0 tokens; waits for response 0 (group 0): 0 tokens, held by 00000-a; "
        "response 1 (group 0): 0 tokens, held by 00000-a"
    )
    assert said[13] == "1 of 8 responses have ended, with 3 tokens; waits for 4 groups"
    assert following.in_words() == "2 of 8 responses have ended, with 4 tokens; waits for 3 groups"


def test_what_comes_quickly_is_not_worth_a_line(store, crew, caplog):
    caplog.set_level(logging.WARNING, logger="tasks.learning.journal_follower")
    following = follower(store, Meanwhile(lambda: finish_group(crew[0], 0)))
    following.wait(EVERY)
    assert caplog.messages == []


def test_what_another_attempt_has_recorded_is_not_waited_for():
    """An end that a later claim made void may have been trained on by the attempt that saw it first."""
    store, clock = MemoryStore(), ManualClock()
    plan = a_plan(1, 1)
    Incarnation(store, plan, 0, "00000-a")
    config = FollowConfig(in_plan_order=True, timeout_s=1e9, poll_interval_s=1.0, flush_interval_s=5.0)
    follower = GroupFollower(JournalReader(store, plan), plan, config, clock)
    with pytest.raises(RecordedElsewhereError):
        follower.wait([0], lambda: clock.monotonic() > 5)
    assert clock.monotonic() == pytest.approx(6, abs=1.1)
