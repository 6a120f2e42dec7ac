"""Members with drafts in a crew: responses change hands by tokens per second, not by steps, and keep their tokens."""

from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.journal.assembly import JournalReader
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import SamplingParams
from storage.stores.memory import MemoryStore
from tasks.crew_model.step_time import StepTime
from tasks.planning.dispatch import DispatchMember, dispatch
from tasks.sampling.engines.scripted_drafter import ScriptedDrafter, changing, perfect, wrong
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.engines.speculation import Speculation
from tests.sessions import (
    GENERATIONS,
    InTurns,
    Killed,
    a_plan,
    a_session,
    live,
)
from tests.tasks.planning.test_dispatch import group_lengths

HELPS_S, VOCABULARY, ROWS = 1e6, 50, 16
LENGTHS = {"median_length": 150, "length_spread": 0.4}
SAVES = {"objective": "gpu_seconds", "idle_timeout_s": HELPS_S, "flush_interval_s": 1.0}


def drafting(share, drafts, *, seed=0, dies=None):
    """What makes an engine of ROWS rows that verifies such drafts; `dies`: the steps until its process dies."""

    class Drafting(ScriptedEngine):
        def __init__(self, _steps, **given):
            drafter = ScriptedDrafter(VOCABULARY, share, answer=self.answer, seed=seed)
            self.speculation = Speculation(drafter, drafts)
            super().__init__(VOCABULARY, ROWS, **LENGTHS, speculation=self.speculation, **given)

        def answer(self, request):
            return self.scripted_tokens(request, request.sampling.max_completion_length)

        def step(self):
            if self.speculation._steps == dies:
                raise Killed
            return super().step()

    return Drafting


def crew(*engines, steps_s=(1.0, 1.0), **settings):
    """A store, and a member for each slot with its engine, the seconds of its steps, and a clock of its own."""
    store = MemoryStore()
    members = [
        a_session(
            store,
            slot,
            clock=ManualClock(),
            engine=engine,
            plan=the_plan(),
            step_time_s=lambda _, step_s=step_s: step_s,
            **settings,
        )
        for slot, (engine, step_s) in enumerate(zip(engines, steps_s, strict=True))
    ]
    return store, members


def the_plan():
    """That of tests.sessions with more for slot 1, and responses long enough that members measure their rates."""
    slots = [replace(slot, groups=groups) for slot, groups in zip(a_plan().slots, ((0,), (1, 2, 3, 4)), strict=True)]
    return replace(
        a_plan(), slots=tuple(slots), sampling=SamplingParams(max_completion_length=400, stop_token_ids=(0,))
    )


class Plain(ScriptedEngine):
    def __init__(self, _steps, **given):
        super().__init__(VOCABULARY, ROWS, **LENGTHS, **given)


def responses(store):
    reader = JournalReader(store, the_plan())
    reader.refresh()
    found = [reader.assemble(response) for response in range(the_plan().num_responses)]
    assert all(response.finish.ends_response for response in found)
    return [(each.token_ids.tolist(), each.logprobs.tolist(), each.finish) for each in found]


def undisturbed():
    store = MemoryStore()
    for slot in range(2):
        live(a_session(store, slot, engine=Plain, plan=the_plan()))
    return responses(store)


EXPECTED = undisturbed()


def side_by_side(*members):
    """Live through them, always the one whose clock is behind; the names in the order of leaving."""
    for member in members:
        member.claim()
    staying, left = list(members), []
    while staying:
        member = min(staying, key=lambda each: each.clock.monotonic())
        if member.advance():
            InTurns.pass_time([member])
        else:
            staying.remove(member)
            left.append(member.incarnation)
    return left


def moved(store):
    """By response that changed hands, who had it before."""
    book = JournalReader(store, the_plan()).book
    book.refresh()
    return {r: owners for r in range(the_plan().num_responses) if (owners := book.former_owners(r))}


def accepted(member):
    return member.engine.speculation.totals.accepted


@pytest.mark.parametrize(("share", "moves"), [(perfect, True), (wrong, False)])
def test_a_member_whose_drafts_are_right_takes_running_responses_of_one_that_is_late_beside_it(share, moves):
    """Steps of 1 s against 1.5 s: only with three tokens a step the other is slower than half."""
    quick = drafting(share, 2)
    store, members = crew(quick, drafting(wrong, 1), steps_s=(1.0, 1.5), idle_timeout_s=HELPS_S, flush_interval_s=1.0)
    side_by_side(*members)
    assert responses(store) == EXPECTED
    own = set(the_plan().responses_of(1))
    assert bool(own & moved(store).keys()) == moves
    assert (accepted(members[0]) > 20) == moves


@pytest.mark.parametrize(("share", "moves"), [(perfect, False), (wrong, True)])
def test_a_member_of_long_steps_with_right_drafts_is_not_late(share, moves):
    """Steps of 3 s that give three tokens of each response are as fast as steps of 1 s that give one."""
    store, members = crew(
        drafting(wrong, 1), drafting(share, 2), steps_s=(1.0, 3.0), idle_timeout_s=HELPS_S, flush_interval_s=1.0
    )
    side_by_side(*members)
    assert responses(store) == EXPECTED
    assert bool(set(the_plan().responses_of(1)) & moved(store).keys()) == moves


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("second", [(changing, 8), (lambda _: 0.5, 3), (wrong, 4)], ids=["changing", "half", "wrong"])
def test_what_a_drafting_member_cuts_ends_in_the_same_tokens_on_one_with_another_drafter(share, second):
    engines = drafting(lambda _: 0.8, 1), drafting(*second, seed=1)
    store, members = crew(*engines, cut_share=share, **SAVES)
    first = side_by_side(*members)[0]
    assert responses(store) == EXPECTED
    handed = moved(store)
    assert handed
    assert {name for owners in handed.values() for name in owners} == {first}
    gone = records.read(store, HeartbeatRecord, layout.alive(0, first))
    assert (gone.state, gone.unfinished, gone.released) == ("gone", 0, 0)


def test_a_small_batch_stays_small_with_drafts():
    plan = the_plan()
    plan = replace(plan, slots=tuple(replace(place, batch_max=2) for place in plan.slots))
    store, members = MemoryStore(), []
    for slot in range(2):
        member = a_session(store, slot, engine=drafting(changing, 4, seed=slot), plan=plan, flush_interval_s=1.0)
        members.append(member)
        assert live(member).responses_finished == len(plan.responses_of(slot))
    assert responses(store) == EXPECTED
    for member in members:
        totals = member.engine.speculation.totals
        assert totals.accepted > 20
        assert totals.tokens <= 2 * member.engine.speculation._steps + totals.accepted


@pytest.mark.parametrize("dies", [1, 6, 25, 40])
def test_a_killed_member_is_followed_by_one_with_another_drafter(dies):
    store, lost = MemoryStore(), drafting(perfect, 4, dies=dies)
    with pytest.raises(Killed):
        live(a_session(store, 0, engine=lost, plan=the_plan(), flush_interval_s=2.0))
    outcome = live(
        a_session(store, 1, engine=drafting(changing, 7), plan=the_plan(), flush_interval_s=2.0, idle_timeout_s=HELPS_S)
    )
    assert responses(store) == EXPECTED
    assert (outcome.tokens_recovered > 0) == (dies > 1)


def test_dispatch_gives_more_to_the_machine_whose_drafts_are_right():
    """Both report what they measured in the heartbeat, from which the next plan is made."""
    store, members = crew(drafting(perfect, 4), drafting(wrong, 4))
    for member in members:
        live(member)
    measured = [records.read(store, HeartbeatRecord, layout.alive(0, each.incarnation)).step_s for each in members]
    assert all(measured)
    pools = [DispatchMember(pool="a", step_time=StepTime(points), responses_max=ROWS) for points in measured]
    plan = dispatch(group_lengths([100] * 60), GENERATIONS, pools, objective="makespan", keep_order=False)
    drafts, plain = (len(each.groups) for each in plan.assignments)
    assert drafts > 2 * plain > 0
    assert plan.assignments[0].ends_s == pytest.approx(plan.assignments[1].ends_s, rel=0.6)
