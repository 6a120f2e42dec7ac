"""Which slots an execution starts for a plan that an interrupted one has worked on."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.clock import ManualClock, SystemClock
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.crew_records import ended_slots
from storage.records.records import ClosedRecord, SlotPlan
from storage.stores.memory import MemoryStore
from tasks.preparing.iteration import prepare
from tasks.preparing.started_slots import crew_slots, needed_slots, started_slots
from tasks.sampling.session.standing import Post, stand
from tests.journals import Incarnation, a_plan
from tests.property_examples import part_of_examples
from tests.small_run import config, memory_store, plan_iteration, roll_out

URL = "memory://started-slots"


def end_all(store, plan, slot, name):
    member = Incarnation(store, plan, slot, name)
    for response in plan.responses_of(slot):
        member.write(response, [5, 2])


def started(store, plan, pools=("rollout",), *, stands=False):
    return started_slots(store, plan, pools, "e2", stands=stands)


def test_slots_of_pools_are_told_without_the_trainers_and_those_of_unknown_pools_are_on_the_first():
    pools = ["far", "rollout", "train", "gone", "rollout"]
    groups = [(0,), (1,), (2,), (3,), ()]
    places = [SlotPlan(slot=k, pool=pool, groups=groups[k]) for k, pool in enumerate(pools)]
    plan = replace(a_plan(4, 1), slots=tuple(places))
    assert crew_slots(plan, ["rollout", "far", "near"]) == [[1, 3], [0], []]
    assert started(MemoryStore("memory://s"), plan, ["rollout", "far", "near"]) == [[1, 3], [0], []]


def test_no_slot_is_started_once_all_responses_have_ended_and_the_run_says_so():
    store, plan = MemoryStore("memory://s"), a_plan(4, 2, slots=2)
    assert started(store, plan) == [[0, 1]]
    assert ended_slots(store, 0, "e2") == set()
    end_all(store, plan, 0, "00000-a")
    end_all(store, plan, 1, "00001-b")
    assert started(store, plan) == [[]]
    # The trainer and the report then wait for none of them.
    assert ended_slots(store, 0, "e2") == {0, 1}


def test_no_slot_is_started_in_a_closed_iteration():
    store, plan = MemoryStore("memory://s"), a_plan(4, 2, slots=2)
    records.commit(store, layout.closed(0), ClosedRecord(iteration=0, reason="filtered"))
    assert started(store, plan) == [[]]


def test_no_more_slots_are_started_than_responses_are_left_first_those_that_have_begun_them():
    store, plan = MemoryStore("memory://s"), a_plan(8, 1, slots=4)
    for slot in (0, 1, 3):
        end_all(store, plan, slot, f"{slot:05d}-a")
    # Slot 2 has two responses, one of which another machine may take.
    assert started(store, plan) == [[0, 2]]
    assert ended_slots(store, 0, "e2") == {1, 3}
    Incarnation(store, plan, 2, "00002-a").write(2, [5, 2])
    assert started(store, plan) == [[2]]
    assert ended_slots(store, 0, "e2") == {0, 1, 3}


def test_an_end_that_no_claim_counts_ends_nothing():
    store, plan = MemoryStore("memory://s"), a_plan(1, 1)
    frozen = Incarnation(store, plan, 0, "00000-a")
    Incarnation(store, plan, 0, "00000-b")
    frozen.write(0, [5, 2])
    assert started(store, plan) == [[0]]


def test_a_response_that_goes_on_has_not_ended():
    store, plan = MemoryStore("memory://s"), a_plan(1, 1)
    Incarnation(store, plan, 0, "00000-a").write(0, [5], Finish.RELEASED)
    assert started(store, plan) == [[0]]


def test_a_damaged_journal_is_no_reason_to_start_nothing(caplog):
    store, plan = MemoryStore("memory://s"), a_plan(1, 1)
    end_all(store, plan, 0, "00000-a")
    store.put(layout.shard(0, "00000-a", 0), b"damaged")
    assert started(store, plan) == [[0]]
    assert "what is left is not known" in caplog.text


def test_members_that_stand_are_started_for_other_plans_too():
    store, plan = MemoryStore("memory://s"), a_plan(1, 1)
    end_all(store, plan, 0, "00000-a")
    assert started(store, plan, stands=True) == [[0]]
    assert ended_slots(store, 0, "e2") == set()


@given(st.lists(st.integers(0, 11), unique=True), st.integers(1, 5))
@settings(max_examples=part_of_examples(0.3))
def test_while_responses_end_the_slots_to_start_only_become_fewer(order, slots):
    """A plan task that is tried again has told of some slots that they are not started."""
    store, plan = MemoryStore("memory://s"), a_plan(12, 1, slots=slots)
    members = {slot: Incarnation(store, plan, slot, f"{slot:05d}-a") for slot in range(slots)}
    before = needed_slots(store, plan)
    for response in order:
        slot = next(slot for slot in range(slots) if response in plan.responses_of(slot))
        members[slot].write(response, [5, 2])
        now = needed_slots(store, plan)
        assert now <= before
        assert bool(now) == (len(order) < 12 or response != order[-1])
        before = now


@pytest.mark.slow
def test_after_an_interrupted_execution_the_plan_task_starts_nothing_if_all_is_there(model):
    memory_store("started-slots")
    planned = config(URL, model)
    plan_iteration(planned)
    roll_out(URL, 0)
    assert prepare(planned, "e1", ManualClock())[1] == [[]]


def refuses(*_):
    raise AssertionError("an engine was built")


def test_a_standing_member_of_one_iteration_builds_no_engine_for_nothing(model):
    memory_store("started-slots")
    reference = plan_iteration(config(URL, model, rollout={"engine": "scripted", "crew": "standing"}))
    roll_out(URL, 0)
    post = Post(run_url=URL, execution=reference.execution, slot=0, first=0, iterations=1)
    assert stand(post, lambda: False, SystemClock(), refuses).tokens_generated == 0
