"""What the plan asks of a session beside its groups: small batches, leaving early, cutting, and seeding."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.clock import ManualClock
from storage.journal.assembly import JournalReader
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import JOINED_POOL, TRAIN_POOL, SlotPlan
from storage.stores.memory import MemoryStore
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.session.claimant import Claimant
from tasks.sampling.session.member import session_config
from tests.journals import Writer
from tests.property_examples import part_of_examples
from tests.sessions import EXPECTED, IN_FLIGHT, InTurns, Killed, a_plan, a_session, live, responses, side_by_side
from tests.small_run import config

HELPS_S = 1e6
SAVES = {"objective": "gpu_seconds", "idle_timeout_s": HELPS_S, "flush_interval_s": 1.0}


def planned(slot, **changes):
    """The plan of tests.sessions with one slot changed."""
    plan = a_plan()
    slots = [replace(place, **changes) if place.slot == slot else place for place in plan.slots]
    return replace(plan, slots=tuple(slots))


def beat(store, session):
    return records.read(store, HeartbeatRecord, layout.alive(0, session.incarnation))


def batches(session):
    """Of every step from now on: how many are decoded, and how many of the slot's own are held."""
    seen, step, holdings = [], session.engine.step, session.state.holdings

    def counted():
        seen.append((len(holdings.in_flight), len(holdings.own & holdings.held.keys())))
        return step()

    session.engine.step = counted
    return seen


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.2))
@given(st.integers(1, IN_FLIGHT + 2), st.integers(0, 15))
def test_the_batch_stays_small_until_the_own_unit_has_ended_and_then_takes_what_is_there(batch_max, steps):
    store, plan = MemoryStore(), planned(0, batch_max=batch_max)
    with pytest.raises(Killed):
        live(a_session(store, 1, steps=steps, plan=plan))
    member = a_session(store, 0, plan=plan, flush_interval_s=1.0, idle_timeout_s=HELPS_S)
    seen = batches(member)
    live(member)
    assert responses(store) == EXPECTED
    assert max(size for size, own in seen if own) == min(batch_max, IN_FLIGHT)
    if steps < 3 and batch_max < 3:  # the other has left nearly all of its unit
        assert max(size for size, own in seen if not own) > batch_max


def test_an_isolated_member_is_not_refilled_from_the_living():
    store, clock, plan = MemoryStore(), ManualClock(), a_plan()
    slots = (replace(plan.slots[0], groups=(0,), batch_max=IN_FLIGHT), replace(plan.slots[1], groups=(1, 2, 3, 4)))
    plan = replace(plan, slots=slots)
    tail = a_session(store, 0, clock=clock, plan=plan, flush_interval_s=1.0, idle_timeout_s=HELPS_S)
    other = a_session(store, 1, clock=clock, plan=plan, flush_interval_s=1.0)
    tail.claim()
    other.claim()
    for member in (tail, other, tail, other, tail, other):
        member.advance()
    clock.sleep(1.0)
    other.keep()
    tail.keep()
    assert (len(tail.state.holdings.in_flight), beat(store, tail).room) == (3, 1)
    assert beat(store, other).waiting == 8
    assert not tail.state.holdings.waiting
    tail.state.holdings.batch_max = None
    clock.sleep(1.0)
    other.keep()
    tail.keep()
    assert tail.state.holdings.waiting


@pytest.mark.parametrize(("idle_timeout_s", "room"), [(0.0, 0), (HELPS_S, 1)])
def test_a_member_that_helps_nobody_tells_the_others_of_no_room(idle_timeout_s, room):
    plan = replace(a_plan(), slots=(replace(a_plan().slots[0], groups=(0,)),))
    member = a_session(MemoryStore(), 0, plan=plan, idle_timeout_s=idle_timeout_s)
    member.claim()
    while not member.state.holdings.in_flight:
        member.advance()
    told = member.state.heartbeat_state()
    assert (told.running, told.room) == (IN_FLIGHT - 1, room)


def test_to_save_machine_time_it_leaves_the_living_alone_and_goes_at_once():
    store, clock = MemoryStore(), ManualClock()
    quick, slow = (a_session(store, slot, clock=clock, **SAVES) for slot in range(2))
    quick.state.holdings.own = frozenset(list(quick.state.holdings.own)[:1])
    left = side_by_side(quick, slow)
    assert len(left) == 2
    assert responses(store) == EXPECTED
    book = JournalReader(store, a_plan()).book
    book.refresh()
    assert book.moved == 0


def test_to_save_machine_time_it_still_takes_over_the_lost_before_it_goes():
    store = MemoryStore()
    with pytest.raises(Killed):
        live(a_session(store, 1, steps=6, **SAVES))
    outcome = live(a_session(store, 0, **SAVES))
    assert responses(store) == EXPECTED
    assert outcome.tokens_recovered > 0


class Roomy(ScriptedEngine):
    """Decodes the whole of a unit together, and has room for another."""

    def __init__(self, _steps, **given):
        super().__init__(50, 16, median_length=12, **given)


def cutters(share):
    """Two members that cut, on one clock."""
    store, clock = MemoryStore(), ManualClock()
    return store, [a_session(store, slot, clock=clock, cut_share=share, engine=Roomy, **SAVES) for slot in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_last_responses_are_handed_to_members_with_room_and_the_member_leaves(share):
    store, members = cutters(share)
    first = side_by_side(*members)[0]
    assert responses(store) == EXPECTED
    reader = JournalReader(store, a_plan())
    reader.refresh()
    moved = [r for r in range(a_plan().num_responses) if reader.book.former_owners(r)]
    assert moved
    assert {name for r in moved for name in reader.book.former_owners(r)} == {first}
    gone = records.read(store, HeartbeatRecord, layout.alive(0, first))
    assert (gone.state, gone.unfinished, gone.released) == ("gone", 0, 0)


@pytest.mark.slow
def test_only_what_fits_in_the_rooms_of_others_is_handed_over():
    store, members = cutters(0.2)
    for member in members:
        member.state.engine_max = 3  # and each has five to nine
    side_by_side(*members)
    assert responses(store) == EXPECTED
    book = JournalReader(store, a_plan()).book
    book.refresh()
    assert book.moved == 0


def test_what_nobody_takes_it_takes_back_after_the_ttl_and_does_not_cut_again():
    _, (cutter, other) = cutters(0.2)
    other.claim()
    cutter.claim()
    turns = 0
    while not cutter.state.has_cut:
        turns += 1
        assert turns < 400
        cutter.advance()
        # It lives, says that it has room and much to do, and takes nothing.
        other.state.holdings.state = "working"
        other.state.holdings.waiting.clear()
        other.beat()
    held = set(cutter.state.holdings.released)
    assert held
    assert not cutter.state.holdings.held
    began_s = cutter.clock.monotonic()
    while not cutter.state.holdings.held:
        assert cutter.clock.monotonic() < began_s + 60
        other.beat()
        assert cutter.advance()
        InTurns.pass_time([cutter])
    assert cutter.clock.monotonic() - began_s >= 4.0  # claim_ttl_s
    assert set(cutter.state.holdings.held) <= held
    while cutter.advance():
        other.beat()
        InTurns.pass_time([cutter])
    assert cutter.state.holdings.ended.keys() >= held
    assert not cutter.state.cut_due


def turns_to_the_cut(cutter, other, turns):
    """Let a member take its turns beside one that has room and takes nothing; how many it took until it cut."""
    other.claim()
    cutter.claim()
    taken = 0
    while not cutter.state.has_cut and taken < turns:
        taken += 1
        cutter.advance()
        other.state.holdings.state = "working"
        other.state.holdings.waiting.clear()
        other.beat()
    return taken


def test_what_a_look_before_an_engines_death_showed_is_no_reason_to_hand_over():
    needed = turns_to_the_cut(*cutters(0.2)[1], 400)
    assert needed < 400
    _, (cutter, other) = cutters(0.2)
    turns_to_the_cut(cutter, other, needed - 1)
    assert not cutter.state.has_cut
    assert cutter.state.cut_due
    cutter.state.note_death(EngineDied("simulated"))
    assert not cutter.state.cut_due


def test_the_crew_stays_as_long_as_the_trainers_machine_has_something_to_hand_over():
    plan = planned(1, pool=TRAIN_POOL)
    store, clock = MemoryStore(), ManualClock()
    seeding = a_session(
        store,
        1,
        clock=clock,
        plan=plan,
        flush_interval_s=1.0,
        time_limit_s=70.0,
        step_time_s=lambda _: 8.0,  # so slowly that the other is done before
    )
    member = a_session(store, 0, clock=clock, plan=plan, flush_interval_s=1.0, objective="gpu_seconds")
    left = side_by_side(seeding, member)
    assert left == [seeding.incarnation, member.incarnation]
    assert beat(store, seeding).unfinished > 0
    assert responses(store) == EXPECTED


def a_claimant(store, plan, slot):
    return Claimant(store, plan, incarnation=f"{slot:05d}-a", slot=slot, claim_ttl_s=1.0, clock=ManualClock())


def test_the_crew_answers_for_what_a_member_from_outside_took_from_the_trainers_machine():
    """It may vanish with it, when the trainer's machine does not generate any more."""
    store, plan = MemoryStore(), planned(1, pool=TRAIN_POOL)
    member, trainers, joined = (a_claimant(store, plan, slot) for slot in range(3))
    for each in (member, trainers):
        each.take_own_slot()
    joined.refresh()
    assert joined._claim(1, {"00001-a"}, plan.responses_of(1))
    member.refresh()
    assert not member.own_unit_ended(member.owned())
    end(store, *joined.owned().items())
    member.refresh()
    assert member.own_unit_ended(member.owned())


def test_what_the_crew_took_from_the_trainers_machine_is_one_members_business():
    store, pools = MemoryStore(), ("rollout", "rollout", TRAIN_POOL)
    plan = replace(
        a_plan(), slots=tuple(SlotPlan(slot=slot, pool=pool, groups=(slot,)) for slot, pool in enumerate(pools))
    )
    member, other, trainers = (a_claimant(store, plan, slot) for slot in range(3))
    for each in (member, other, trainers):
        each.take_own_slot()
    other.refresh()
    assert other._claim(2, {"00002-a"}, plan.responses_of(2))
    member.refresh()
    assert member.own_unit_ended(member.owned())


def test_where_members_cut_each_answers_for_what_it_had_until_the_crew_has_it_or_it_has_ended():
    """0 has cut and left; 1 took it, and a member from outside took it from 1."""
    store, plan = MemoryStore(), a_plan()
    mine, last = plan.responses_of(0), plan.responses_of(0)[-1]

    cutter, taker, joined = (a_claimant(store, plan, slot) for slot in range(3))
    for each in (cutter, taker):
        each.take_own_slot()
    taker.refresh()
    assert taker._claim(0, {"00000-a"}, mine)
    cutter.refresh()
    assert not cutter.own_unit_ended(cutter.owned(), cuts=True)
    assert cutter.own_unit_ended(cutter.owned(), cuts=True, has_cut=True)
    joined.refresh()
    assert joined._claim(0, {"00001-a"}, (last,))
    for each in (cutter, taker):
        each.refresh()
        assert not each.own_unit_ended(each.owned(), cuts=True, has_cut=True)
    assert taker.own_unit_ended(taker.owned())  # where nobody cuts, slot 0 answers for it
    end(store, (last, joined.owned()[last]))
    for each in (cutter, taker):
        each.refresh()
        assert each.own_unit_ended(each.owned(), cuts=True, has_cut=True)


def test_only_the_plans_own_crew_leaves_for_the_sake_of_its_machines_time(tmp_path):
    planning = {"objective": "gpu_seconds", "cut_share": 0.7}
    run = config("memory://planned", tmp_path, planning=planning)
    told = {pool: session_config(run, slot=0, pool=pool) for pool in ("rollout", "far", TRAIN_POOL, JOINED_POOL)}
    assert {(told[pool].objective, told[pool].cut_share) for pool in ("rollout", "far")} == {("gpu_seconds", 0.7)}
    assert {(told[pool].objective, told[pool].cut_share) for pool in (TRAIN_POOL, JOINED_POOL)} == {("makespan", None)}


def end(store, *responses):
    """The member from outside journals the ends of responses; given with the epochs of its claims."""
    writer = Writer(store, 0, "00002-a", 0)
    for response, epoch in responses:
        writer.append(response, epoch, 0, (5, 0), (-1.0, -1.0), Finish.STOP)
    writer.flush()
