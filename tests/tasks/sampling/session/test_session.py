"""The session against real stores: kills at any step, restarts, zombies, notices; always the undisturbed tokens."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.clock import ManualClock, SystemClock
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.stores.connect import connect
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreUnavailable
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.session.session_outcome import Preempted
from tests.property_examples import part_of_examples
from tests.sessions import EXPECTED, IN_FLIGHT, SLOTS, Killed, a_plan, a_session, live, responses


def test_lengths_differ_so_that_slots_are_refilled():
    assert len({len(tokens) for tokens, _, _ in EXPECTED}) > 4


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.3))
@given(
    st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 60)), max_size=12), st.sampled_from([1.0, 3.0, 7.0])
)
def test_killed_at_any_steps_it_ends_with_the_undisturbed_tokens(kills, flush_interval_s):
    store = MemoryStore()
    for slot, steps in kills:
        try:
            live(a_session(store, slot, steps=steps, flush_interval_s=flush_interval_s))
        except Killed:
            continue
    for slot in range(SLOTS):
        live(a_session(store, slot))
    assert responses(store) == EXPECTED


@pytest.mark.slow
def test_a_kill_costs_at_most_one_flush_interval_of_tokens():
    """The scripted engine takes 1 s a step, so a flush interval of 5 s is at most 5 steps of each row."""
    for steps in range(1, 40):
        store = MemoryStore()
        victim = a_session(store, 0, steps=steps, flush_interval_s=5.0)
        with pytest.raises(Killed):
            live(victim)
        generated = victim.outcome().tokens_generated
        successor = a_session(store, 0)
        successor.claim()
        assert generated - successor.outcome().tokens_recovered <= 5 * IN_FLIGHT


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "local", "s3"])
def test_results_are_the_same_on_every_store(kind, tmp_path, request):
    store = {
        "memory": MemoryStore,
        "local": lambda: LocalStore(tmp_path),
        "s3": lambda: connect(f"{request.getfixturevalue('s3_url')}/session"),
    }[kind]()
    for steps in (4, 9):
        with pytest.raises(Killed):
            live(a_session(store, 1, steps=steps))
    for slot in range(SLOTS):
        live(a_session(store, slot))
    assert responses(store) == EXPECTED


def test_a_notice_loses_nothing_and_hands_everything_over():
    store = MemoryStore()
    told = [False] * 10 + [True]
    victim = a_session(store, 0, notice=lambda: told.pop(0), flush_interval_s=60.0)
    with pytest.raises(Preempted):
        live(victim)
    alive = records.read(store, HeartbeatRecord, layout.alive(0, victim.incarnation))
    assert alive.state == "gone"
    successor = a_session(store, 0)
    successor.claim()
    assert successor.outcome().tokens_recovered == victim.outcome().tokens_generated > 0


def test_an_engine_that_fails_loses_no_token_it_had_handed_over():
    store = MemoryStore()
    victim = a_session(store, 0, flush_interval_s=60.0)
    step, left = victim.engine.step, [1] * 7

    def fails():
        if not left:
            raise EngineError("out of memory")
        left.pop()
        return step()

    victim.engine.step = fails
    with pytest.raises(EngineError, match="out of memory"):
        victim.run()
    successor = a_session(store, 0)
    successor.claim()
    assert successor.outcome().tokens_recovered == victim.outcome().tokens_generated > 0


def test_a_zombie_stops_when_it_learns_that_its_slot_was_taken_over():
    store = MemoryStore()
    zombie = a_session(store, 0, flush_interval_s=1.0)
    zombie.claim()
    live(a_session(store, 0))
    outcome = zombie.run()
    assert outcome.responses_finished == 0
    live(a_session(store, 1))
    assert responses(store) == EXPECTED


def test_a_member_whose_slot_was_taken_by_one_that_dies_waits_and_takes_it_back():
    store = MemoryStore()
    member = a_session(store, 0, flush_interval_s=1.0)
    member.claim()
    a_session(store, 0).claim()  # and is never heard of again
    assert member.run().responses_finished >= len(a_plan().responses_of(0))
    live(a_session(store, 1))
    assert responses(store) == EXPECTED


def test_a_finished_slot_has_nothing_left_to_claim_and_loads_no_weights():
    store = MemoryStore()
    live(a_session(store, 0))
    again = a_session(store, 0, load=lambda *_: pytest.fail("nothing is left to generate"))
    assert again.claim() == 0
    assert again.run().tokens_generated == 0


def test_remaining_budget_after_resume_is_what_was_left():
    store = MemoryStore()
    with pytest.raises(Killed):
        live(a_session(store, 0, steps=11, flush_interval_s=1.0))
    live(a_session(store, 0))
    live(a_session(store, 1))
    assert max(len(tokens) for tokens, _, _ in responses(store)) <= a_plan().sampling.max_completion_length
    assert responses(store) == EXPECTED


@pytest.mark.slow
def test_two_threads_give_the_same_journal(tmp_path):
    store = LocalStore(tmp_path)
    for slot in range(SLOTS):
        live(
            a_session(
                store,
                slot,
                clock=SystemClock(),
                in_threads=True,
                flush_interval_s=0.05,
                step_time_s=lambda _: 0.01,
            )
        )
    assert responses(store) == EXPECTED


class Throttled(MemoryStore):
    """A store that refuses every second shard the first time."""

    refused: frozenset[str] = frozenset()

    def create(self, key, body):
        if "journal" in key and key not in self.refused and key.endswith(("1.arrow", "3.arrow")):
            self.refused |= {key}
            raise StoreUnavailable("slow down")
        return super().create(key, body)


def test_a_flush_that_fails_now_and_then_is_made_up_for():
    store = Throttled()
    for slot in range(SLOTS):
        live(a_session(store, slot, flush_interval_s=1.0))
    assert store.refused
    assert responses(store) == EXPECTED


@pytest.mark.parametrize(("flush_interval_s", "heartbeat_interval_s"), [(5.0, 5.0), (5.0, 4.0), (5.0, 3.0), (4.0, 9.0)])
def test_no_token_waits_longer_than_the_flush_interval(flush_interval_s, heartbeat_interval_s):
    store, clock, moments = MemoryStore(), ManualClock(), [0.0]
    create = store.create

    def noted(key, body):
        if "/journal/" in key:
            moments.append(clock.monotonic())
        return create(key, body)

    store.create = noted
    live(a_session(store, 0, clock=clock, flush_interval_s=flush_interval_s, heartbeat_interval_s=heartbeat_interval_s))
    assert max(b - a for a, b in itertools.pairwise(moments)) <= flush_interval_s + 1.0  # and one step of 1 s


def test_losing_a_race_for_the_slot_while_the_predecessor_still_writes_loses_no_token():
    """The winner seals more of the predecessor than the loser had read; the loser then takes over from the winner."""
    store = MemoryStore()
    predecessor = a_session(store, 0, flush_interval_s=1.0, steps=6)
    predecessor.claim()
    loser = a_session(store, 0)

    create, done = store.create, []

    def others_first(key, body):
        if "/claims/00000/000002" in key and not done:
            done.append(key)
            with pytest.raises(Killed):
                predecessor.run()
            a_session(store, 0).claim()
        return create(key, body)

    store.create = others_first
    loser.claim()
    assert done
    loser.run()
    live(a_session(store, 1))
    assert responses(store) == EXPECTED


class Unreachable(MemoryStore):
    """A store that stops answering creates after a while."""

    left = 6

    def create(self, key, body):
        self.left -= 1
        if self.left < 0 and "journal" in key:
            raise StoreUnavailable("no answer")
        return super().create(key, body)


def test_a_store_that_is_gone_for_good_ends_the_session_by_name():
    with pytest.raises(StoreUnavailable, match="left nothing behind"):
        live(a_session(Unreachable(), 0, flush_interval_s=1.0))
