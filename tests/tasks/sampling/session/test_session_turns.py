"""Sessions whose policy takes turns with a scripted environment: kills before, inside and after calls."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.clock import ManualClock
from storage.journal.assembly import JournalReader
from storage.journal.shard import Finish
from storage.journal.turns import decode_turn
from storage.stores.memory import MemoryStore
from tasks.sampling.session.actions import Lane
from tasks.sampling.session.session_outcome import Preempted
from tasks.turns.environments import Answer
from tasks.turns.scripted_environments import Script, ScriptedEnvironments, ToolServer
from tests.property_examples import part_of_examples
from tests.sessions import GENERATIONS, GROUPS, SLOTS, InTurns, Killed, a_plan, a_session, live, side_by_side

VOCABULARY = 50
SCRIPT = Script(call_s=2.0)


def a_talker(store, slot, server, *, script=SCRIPT, clock=None, **given):
    """A session whose turns are answered."""
    clock = clock or ManualClock()
    environments = ScriptedEnvironments(script, server, clock, VOCABULARY)
    return a_session(store, slot, clock=clock, environments=environments, **given)


def assembled(store):
    reader = JournalReader(store, a_plan())
    reader.refresh()
    return [reader.assemble(response) for response in range(GROUPS * GENERATIONS)]


def conversations(store):
    """What is learned from: tokens, log-probs, origins, ends, and the answers but for how they came about."""
    found = assembled(store)
    assert all(response.finish.ends_response for response in found)
    return [
        (
            response.token_ids.tolist(),
            response.logprobs.tolist(),
            response.origins,
            response.finish,
            [[(call.call_id, call.result) for call in decode_turn(event).calls] for event in response.events],
            [decode_turn(event).reward for event in response.events],
        )
        for response in found
    ]


def undisturbed(script=SCRIPT):
    store, server = MemoryStore(), ToolServer()
    for slot in range(SLOTS):
        live(a_talker(store, slot, server, script=script))
    return conversations(store), server


EXPECTED, SERVER = undisturbed()


def test_there_are_turns_of_all_kinds():
    turns = [len(events) for *_, events, _ in EXPECTED]
    assert {1, 2, 3} <= set(turns)
    assert {finish for _, _, _, finish, *_ in EXPECTED} >= {Finish.STOP, Finish.LENGTH}
    assert {call.has_effects for call in SERVER.calls} == {True, False}
    assert len({call.call_id for call in SERVER.calls}) == len(SERVER.calls) > 10


def test_the_last_answer_has_the_reward_and_no_tokens():
    for token_ids, logprobs, origins, _, calls, rewards in EXPECTED:
        assert sum(origins) == len(token_ids)
        assert len(logprobs) == sum(origins[::2])
        assert len(origins) == 2 * len(calls) - 1
        assert [reward is not None for reward in rewards] == [False] * (len(calls) - 1) + [True]


def test_a_turn_names_the_tools_of_its_plan():
    told = []

    class Listening(ScriptedEnvironments):
        def begin(self, turns):
            told.extend(turn.tools for turn in turns)
            super().begin(turns)

    clock, tools = ManualClock(), ({"type": "function"},)
    environments = Listening(SCRIPT, ToolServer(), clock, VOCABULARY)
    live(a_session(MemoryStore(), 0, clock=clock, environments=environments, plan=replace(a_plan(), tools=tools)))
    assert told
    assert set(map(len, told)) == {1}
    assert told[0] == tools


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.5))
@given(
    st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 60)), max_size=12),
    st.sampled_from([1.0, 3.0, 7.0]),
    st.booleans(),
)
def test_killed_at_any_steps_it_ends_with_the_undisturbed_conversations(kills, flush_interval_s, can_be_rebuilt):
    store, server = MemoryStore(), ToolServer()
    script = Script(call_s=2.0, can_be_rebuilt=can_be_rebuilt, attempts_max=100)
    given_to_all = {"flush_interval_s": flush_interval_s, "script": script}
    for slot, steps in kills:
        try:
            live(a_talker(store, slot, server, steps=steps, **given_to_all))
        except Killed:
            continue
    for slot in range(SLOTS):
        live(a_talker(store, slot, server, **given_to_all))
    assert conversations(store) == EXPECTED
    if can_be_rebuilt:
        check_calls(store, server)


def check_calls(store, server):
    """A call with side effects was made more than once only if its answer says that it may have been."""
    unknown = {
        call.call_id
        for response in assembled(store)
        for event in response.events
        for call in decode_turn(event).calls
        if call.unknown
    }
    made = [call.call_id for call in server.calls if call.has_effects]
    assert {name for name in made if made.count(name) > 1} <= unknown


def until(session, happens):
    """Live through the session's actions until something holds."""
    session.claim()
    while not happens():
        assert session.advance()
        InTurns.pass_time([session])


def journalled(store, response):
    reader = JournalReader(store, a_plan())
    reader.refresh()
    return reader.assemble(response)


def test_a_call_with_side_effects_is_made_once_its_turn_is_in_the_journal():
    store, server = MemoryStore(), ToolServer()
    session = a_talker(store, 0, server, script=Script(effects_share=1.0), flush_interval_s=1000.0)
    until(session, lambda: server.calls)
    assert all(journalled(store, call.response).owes for call in server.calls)
    assert session.clock.monotonic() < 100.0


def test_other_calls_do_not_wait_for_the_journal():
    store, server = MemoryStore(), ToolServer()
    session = a_talker(store, 0, server, script=Script(effects_share=0.0), flush_interval_s=1000.0)
    until(session, lambda: server.calls)
    assert all(not len(journalled(store, response).token_ids) for response in session.state.holdings.acting)


@pytest.mark.parametrize(("seconds", "is_due"), [(499.0, False), (501.0, True)])
def test_tool_time_of_more_than_an_interval_forces_a_flush(seconds, is_due):
    session = a_talker(MemoryStore(), 0, ToolServer(), script=Script(effects_share=0.0), flush_interval_s=500.0)
    state = session.state
    until(session, lambda: state.holdings.is_answered)
    response = next(r for r, owed in state.holdings.acting.items() if owed.begun)
    state.take_answers([Answer(response, state.holdings.held[response].epoch, (), b"{}", Finish.STOP, seconds)])
    assert (Lane.FLUSH in state.hastened) is is_due


@pytest.mark.parametrize(("effects", "is_due"), [(0.0, False), (1.0, True)])
def test_the_answer_of_a_call_with_side_effects_is_written_at_once(effects, is_due):
    session = a_talker(MemoryStore(), 0, ToolServer(), script=Script(effects_share=effects), flush_interval_s=500.0)
    state = session.state
    until(session, lambda: state.holdings.is_answered)
    response = next(r for r, owed in state.holdings.acting.items() if owed.begun)
    state.hastened.clear()
    state.take_answers([Answer(response, state.holdings.held[response].epoch, (), b"{}", Finish.STOP, 0.1)])
    assert (Lane.FLUSH in state.hastened) is is_due


def test_a_response_that_acts_takes_no_place_in_the_engine():
    store, server = MemoryStore(), ToolServer()
    session = a_talker(store, 0, server, script=Script(effects_share=0.0, call_s=1000.0))
    until(session, lambda: len(session.state.holdings.acting) > session.state.engine_max)
    assert session.state.holdings.in_flight.isdisjoint(session.state.holdings.acting)


def test_a_member_that_gets_notice_while_tools_run_leaves_and_its_successor_calls_again():
    store, server = MemoryStore(), ToolServer()
    noticed = []
    script = Script(effects_share=1.0, call_s=1000.0)
    session = a_talker(store, 0, server, script=script, notice=lambda: bool(noticed), flush_interval_s=2.0)
    until(session, lambda: server.calls)
    noticed.append(True)
    with pytest.raises(Preempted):
        session.run()
    first = {call.call_id for call in server.calls}
    for slot in range(SLOTS):
        live(a_talker(store, slot, server, script=script, flush_interval_s=2.0))
    again = [call for call in server.calls if call.call_id in first]
    assert len(again) == 2 * len(first)
    assert {call.epoch for call in again} == {1, 2}
    check_calls(store, server)
    assert conversations(store) == undisturbed(script)[0]


def test_answers_of_tools_are_not_among_the_tokens_that_a_successor_recovers():
    store, server, noticed = MemoryStore(), ToolServer(), []
    victim = a_talker(store, 0, server, notice=lambda: bool(noticed))
    until(victim, lambda: len(server.calls) > 3)
    noticed.append(True)
    with pytest.raises(Preempted):
        victim.run()
    kept = sum(response.policy_length for response in assembled(store))
    assert kept < sum(len(response.token_ids) for response in assembled(store))
    successor = a_talker(store, 0, server)
    live(successor)
    assert successor.outcome().tokens_recovered == kept


def test_two_members_side_by_side_end_with_the_undisturbed_conversations():
    store, server, clock = MemoryStore(), ToolServer(), ManualClock()
    sessions = [
        a_talker(store, slot, server, clock=clock, idle_timeout_s=30.0, script=Script(call_s=20.0))
        for slot in range(SLOTS)
    ]
    side_by_side(*sessions)
    assert conversations(store) == undisturbed(Script(call_s=20.0))[0]
    check_calls(store, server)


def test_lost_environments_begin_again_and_then_fail():
    store, server = MemoryStore(), ToolServer()
    for slot in range(SLOTS):
        live(a_talker(store, slot, server, script=Script(losses=1)))
    again = assembled(store)
    assert {response.restarts for response in again} == {0, 1}
    assert conversations(store) == undisturbed()[0]

    store = MemoryStore()
    for slot in range(SLOTS):
        live(a_talker(store, slot, ToolServer(), script=Script(losses=9)))
    failed = [response for response in assembled(store) if response.finish is Finish.FAILED]
    assert {response.restarts for response in failed} == {2}
    assert [response.response for response in failed] == [r.response for r in again if r.restarts]


def test_answers_of_an_environment_that_was_lost_to_another_member_do_not_count():
    store, server = MemoryStore(), ToolServer()
    script = Script(effects_share=0.0, call_s=30.0)
    session = a_talker(store, 0, server, script=script)
    until(session, lambda: session.state.holdings.is_answered)
    [response, *_] = [r for r, owed in session.state.holdings.acting.items() if owed.begun]
    session.state.holdings.let_go({response})
    before = session.state.holdings.pending
    until(session, lambda: not session.state.holdings.acting)
    assert response not in session.state.holdings.held
    assert all(row.response != response for row in before.rows(0))


def test_a_dead_engine_keeps_the_open_turns():
    store, server = MemoryStore(), ToolServer()
    session = a_talker(store, 0, server, script=Script(effects_share=0.0, call_s=30.0))
    until(session, lambda: session.state.holdings.is_answered and session.state.holdings.in_flight)
    acting = set(session.state.holdings.acting)
    session.state.holdings.begin_again()
    session.state.check()
    assert set(session.state.holdings.acting) == acting
    assert acting.isdisjoint(session.state.holdings.waiting)
