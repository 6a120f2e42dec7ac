"""Who is waited for when an iteration is concluded, and which slots of an execution never came."""

from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord, note_rollout_ended
from storage.records.records import ReportRecord, SettingsRecord, SlotLife
from storage.stores.memory import MemoryStore
from tasks.reporting.crew_presence import await_goodbyes, described, slots_not_come
from tests.sessions import a_plan

EXECUTION = "f1234"


def alive(slot, state, name="a", started_at_s=0.0):
    return HeartbeatRecord(
        incarnation=f"{slot:05d}-{name}",
        slot=slot,
        state=state,
        beat=1,
        pool="rollout",
        host="h",
        pid=1,
        started_at_s=started_at_s,
        updated_at_s=0,
        tokens_generated=0,
        tokens_recovered=0,
        prefill_tokens=0,
        responses_finished=0,
        engine="e",
        batch_invariant=True,
    )


def beats(store, *members):
    for member in members:
        records.put(store, layout.alive(0, member.incarnation), member)


class Leaves(ManualClock):
    """A clock under which a member leaves at a second."""

    def __init__(self, store, member, at_s):
        super().__init__()
        self.store, self.member, self.at_s = store, member, at_s

    def sleep(self, duration_s):
        super().sleep(duration_s)
        if self.monotonic() >= self.at_s:
            beats(self.store, replace(self.member, state="gone"))


def test_where_everybody_has_left_nobody_is_waited_for():
    store, clock = MemoryStore(), ManualClock()
    beats(store, alive(0, "gone"), alive(1, "gone"))
    await_goodbyes(store, a_plan(), 8.0, clock)
    assert clock.monotonic() == 0


def test_a_member_that_is_about_to_leave_is_waited_for_and_no_longer():
    store = MemoryStore()
    beats(store, alive(0, "gone"), alive(1, "working"))
    clock = Leaves(store, alive(1, "working"), 2.0)
    await_goodbyes(store, a_plan(), 8.0, clock)
    assert 2.0 <= clock.monotonic() < 3.0


def test_who_never_says_it_is_waited_for_as_long_as_is_allowed():
    store, clock = MemoryStore(), ManualClock()
    beats(store, alive(1, "working"))
    await_goodbyes(store, a_plan(), 8.0, clock)
    assert 8.0 <= clock.monotonic() < 9.0


def test_a_process_that_its_slots_next_one_followed_is_not_waited_for():
    store, clock = MemoryStore(), ManualClock()
    beats(store, alive(0, "working", "killed", 1.0), alive(0, "gone", "next", 2.0))
    await_goodbyes(store, a_plan(), 8.0, clock)
    assert clock.monotonic() == 0


def test_two_that_share_a_number_beyond_the_plan_are_both_waited_for_and_the_trainer_is_not():
    store, clock = MemoryStore(), ManualClock()
    beats(store, replace(alive(5, "working"), pool="train"))
    await_goodbyes(store, a_plan(), 8.0, clock)
    assert clock.monotonic() == 0
    beats(store, alive(7, "working", "one", 1.0), alive(7, "gone", "other", 2.0))
    await_goodbyes(store, a_plan(), 8.0, clock)
    assert clock.monotonic() >= 8.0


def life(slot):
    return SlotLife(
        slot=slot,
        incarnation=f"{slot:05d}-a",
        pool="rollout",
        started_at_s=0,
        ended_at_s=1,
        state="gone",
        tokens_kept=1,
        tokens_recovered=0,
        tokens_regenerated=0,
    )


def concluded(store, iteration, execution, *came, crew="iteration"):
    records.put(store, layout.plan(iteration), replace(a_plan(), iteration=iteration))
    config = {"rollout": {"crew": crew}}
    records.put(store, layout.settings(iteration), SettingsRecord(config=config, execution=execution))
    report = ReportRecord(
        iteration=iteration,
        weight_version=iteration + 1,
        next_prompt=0,
        metrics={},
        rewards=(),
        lengths=(),
        lives=tuple(life(slot) for slot in came),
        train_started_at_s=0,
        train_ended_at_s=0,
        created_at_s=0,
    )
    records.put(store, layout.report(iteration), report)


@pytest.fixture
def store():
    """The plan has slots 0 and 1; iteration 0 is another execution's."""
    store = MemoryStore()
    concluded(store, 0, "another", 0)
    concluded(store, 1, EXECUTION, 0)
    concluded(store, 2, EXECUTION)
    concluded(store, 3, EXECUTION, 0, 1)
    return store


def test_slots_that_never_came_are_told_for_all_iterations_of_the_execution(store):
    assert slots_not_come(store, 3, EXECUTION) == {1: [1], 2: [0, 1]}


def test_a_map_that_has_ended_holds_nothing_open(store):
    note_rollout_ended(store, 2, EXECUTION, "rollout", [0, 1])
    note_rollout_ended(store, 1, "another", "rollout", [0, 1])
    assert slots_not_come(store, 3, EXECUTION) == {1: [1]}


def test_a_standing_member_is_missing_only_if_it_came_in_no_iteration(store):
    for iteration, came in ((1, [0]), (2, []), (3, [0])):
        concluded(store, iteration, EXECUTION, *came, crew="standing")
    assert slots_not_come(store, 3, EXECUTION) == {3: [1]}
    concluded(store, 2, EXECUTION, 1, crew="standing")
    assert slots_not_come(store, 3, EXECUTION) == {}


def test_it_is_told_in_a_sentence_with_what_to_set():
    assert described({}) == ""
    told = described({1: [1], 2: [0, 1]})
    assert told.startswith("3 rollout pods")
    assert "(1, 2)" in told
    assert "pod-pending-timeout" in told
