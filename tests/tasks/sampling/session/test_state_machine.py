"""The state machine by itself: events go in, actions come out, and nothing else happens."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.stores.memory import MemoryStore
from storage.stores.store import StoreUnavailable
from tasks.sampling.engines.engine import EngineDied, EngineError, FinishReason, TokenDelta
from tasks.sampling.session.actions import (
    AbortResponses,
    ClaimedResponse,
    Claims,
    DecodeResult,
    Lane,
    LoadWeights,
    Noticed,
    ProbeClaims,
    ReadAsks,
    ReadClosed,
    Rest,
    RestartEngine,
    StartResponses,
    Wake,
    WriteHeartbeat,
    WriteShard,
)
from tasks.sampling.session.session import BESIDE
from tasks.sampling.session.session_outcome import Preempted
from tasks.sampling.session.state_machine import StateMachine
from tasks.sampling.session.storage_lanes import FAILURES_MAX, begins_s
from tests.sessions import IN_FLIGHT, a_session
from tests.told_machine import CONFIG, OWN, Told, a_state


def test_the_same_events_give_the_same_actions():
    """A whole life on a real store is told to a fresh machine again."""
    session = a_session(MemoryStore(), 0, flush_interval_s=2.0, idle_timeout_s=9.0)
    lived, step = [], session._machine.step

    def noted(event):
        actions = step(event)
        lived.append((event, [repr(action) for action in actions if not isinstance(action, WriteShard)]))
        return actions

    session._machine.step = noted
    outcome = session.run()
    config = replace(CONFIG, heartbeat_interval_s=2.0, claim_ttl_s=8.0, idle_timeout_s=9.0)
    again = StateMachine(a_state(session.incarnation, config))
    for event, actions in lived:
        assert [repr(a) for a in again.step(event) if not isinstance(a, WriteShard)] == actions
    assert again.state.outcome() == outcome
    assert len(lived) > 100


def test_tokens_are_in_the_next_shard_and_only_in_that():
    member = Told().claimed().decoding()
    member.decoded(5)
    member.now_s = 2.0
    [write] = member.tell(Lane.FLUSH)
    assert [(row.response, row.start, row.token_ids.tolist()) for row in write.pending.rows(0)] == [
        (response, 0, [5]) for response in OWN[:IN_FLIGHT]
    ]
    member.decoded(6)
    assert isinstance(member.tell(Lane.FLUSH)[0], WriteHeartbeat)
    rest, wake = member.tell(Lane.FLUSH)
    assert (rest, wake) == (Rest(4.0), Wake(Lane.CLAIM))
    assert member.tell(Lane.CLAIM) == (ProbeClaims(OWN),)
    assert member.tell(Lane.CLAIM) == (ReadClosed(),)
    assert member.tell(Lane.CLAIM, False) == (ReadAsks(),)
    assert member.tell(Lane.CLAIM, ()) == (Rest(6.0),)  # it has no room for more


def test_what_another_member_has_claimed_is_aborted_and_its_tokens_are_ignored():
    member = Told().claimed().decoding()
    lost = OWN[0]
    member.now_s = 2.0
    member.tell(Lane.CLAIM)
    member.tell(Lane.CLAIM, True, Claims(dict.fromkeys(OWN[1:], 1), 1, 0))
    assert lost not in member.state.holdings.held
    deltas = [TokenDelta(response, (5,), (-1.0,), None) for response in OWN[:IN_FLIGHT]]
    [abort] = member.tell(Lane.DECODE, DecodeResult(deltas, 1.0))
    assert abort == AbortResponses((lost,))
    assert member.state.outcome().tokens_generated == IN_FLIGHT - 1
    assert member.tell(Lane.DECODE) == (StartResponses(((OWN[IN_FLIGHT], ()),)),)


def test_what_it_takes_back_begins_again_from_the_new_claims_tokens_after_the_engine_has_forgotten_it():
    member = Told().claimed().decoding()
    back = OWN[0]
    member.state.take((ClaimedResponse(back, 3, (7, 8)),))
    deltas = [TokenDelta(back, (5,), (-1.0,), FinishReason.STOP)]
    assert member.tell(Lane.DECODE, DecodeResult(deltas, 1.0)) == (AbortResponses((back,)),)
    assert member.state.holdings.held[back].token_ids == [7, 8]
    assert member.state.holdings.ends == 0


def test_a_member_that_leaves_writes_at_once_beside_a_look_and_says_gone_after_it():
    member = Told().claimed().decoding()
    member.decoded(5)
    member.now_s = 4.0
    assert member.tell(Lane.CLAIM) == (ProbeClaims(OWN),)  # a look is under way
    assert member.machine.step(Noticed(now_s=4.0)) == ()  # the decode lane is in the engine
    write = member.decoded(6)[0]
    assert [row.token_ids.tolist() for row in write.pending.rows(0)] == [[5, 6]] * IN_FLIGHT
    assert isinstance(member.tell(Lane.DECODE)[0], Rest)
    assert member.tell(Lane.FLUSH) == ()
    assert isinstance(member.tell(Lane.DECODE)[0], Rest)
    woken = member.woken
    assert member.tell(Lane.CLAIM) == ()  # no further duty is begun
    assert member.woken == woken + 1
    assert isinstance(member.tell(Lane.DECODE)[0], WriteShard)
    [gone] = member.tell(Lane.DECODE)
    assert (gone.heartbeat_state.state, gone.heartbeat_state.unfinished, gone.heartbeat_state.running) == (
        "gone",
        len(OWN),
        0,
    )
    assert member.tell(Lane.DECODE) == (AbortResponses(tuple(sorted(OWN[:IN_FLIGHT]))),)
    with pytest.raises(Preempted):
        member.tell(Lane.DECODE)


def test_while_a_shard_is_written_no_other_is_begun_and_then_the_rest_waits_for_no_look():
    member = Told().claimed().decoding()
    member.decoded(5)
    member.now_s = 4.0
    assert member.tell(Lane.CLAIM) == (ProbeClaims(OWN),)  # a look is under way
    assert isinstance(member.tell(Lane.FLUSH)[0], WriteShard)
    member.machine.step(Noticed(now_s=4.0))
    member.decoded(6)
    assert isinstance(member.tell(Lane.DECODE)[0], Rest)  # instead of a second write
    member.tell(Lane.FLUSH, 4)
    [write] = member.tell(Lane.DECODE)
    assert [row.token_ids.tolist() for row in write.pending.rows(0)] == [[6]] * IN_FLIGHT
    assert isinstance(member.tell(Lane.DECODE)[0], Rest)  # "gone" waits for the look


@pytest.mark.parametrize("lane", BESIDE)
def test_a_lane_that_does_not_end_is_not_waited_for_without_end(lane):
    member = Told().claimed().decoding()
    member.now_s = 2.0
    member.tell(lane)
    action = member.fail(Lane.DECODE, EngineError("out of memory"))[0]
    if isinstance(action, WriteShard):
        action = member.tell(Lane.DECODE)[0]
    assert isinstance(action, Rest)
    member.now_s = 70.0
    assert isinstance(member.tell(Lane.DECODE)[0], AbortResponses)
    with pytest.raises(EngineError, match="out of memory"):
        member.tell(Lane.DECODE)


def test_what_is_handed_over_is_released_once_its_tokens_are_journalled():
    member = Told().claimed().decoding()
    member.decoded(5)
    assert isinstance(member.tell(Lane.CLAIM)[0], ProbeClaims)
    assert member.tell(Lane.CLAIM) == (ReadClosed(),)
    assert member.tell(Lane.CLAIM, False) == (ReadAsks(),)
    assert isinstance(member.tell(Lane.CLAIM, (OWN[0], 99))[0], Rest)
    member.decoded(6)  # the tokens of the step that was under way count
    assert member.state.holdings.released == {OWN[0]: 1}
    assert member.state.heartbeat_state().released == 0
    member.now_s = 4.0
    member.tell(Lane.FLUSH)
    member.tell(Lane.FLUSH, 5)
    assert member.state.heartbeat_state().released == 1
    assert member.state.heartbeat_state().unfinished == len(OWN)


def test_a_dead_engine_is_restarted_and_loaded_before_anything_is_decoded():
    member = Told().claimed().decoding()
    member.decoded(5)
    assert member.fail(Lane.DECODE, EngineDied("gone"))[0] == RestartEngine()
    assert member.tell(Lane.DECODE) == (LoadWeights(),)
    [start] = member.tell(Lane.DECODE, True)
    assert start == StartResponses(tuple((response, (5,)) for response in OWN[:IN_FLIGHT]))


def test_a_store_that_is_out_is_tried_again_and_given_up_after_some_failures_of_one_duty():
    member = Told().claimed().decoding()
    for count in range(FAILURES_MAX):
        assert member.state.error is None
        member.now_s = 2.0 * (count + 1)
        # The heartbeat is due every second time, and works; the flush never does.
        action = member.tell(Lane.FLUSH)[0]
        assert isinstance(action, WriteShard)
        action = member.fail(Lane.FLUSH, StoreUnavailable("slow down"))
        while action and not isinstance(action[0], Rest):
            action = member.tell(Lane.FLUSH)
    assert isinstance(member.state.error, StoreUnavailable)


@pytest.mark.parametrize(
    ("bug", "what"),
    [
        (lambda state: state.holdings.in_flight.clear(), "a held response has no state"),
        (lambda state: state.holdings.forgotten.update(state.holdings.in_flight), "is to be aborted"),
        (lambda state: setattr(state.holdings, "state", "loading"), "without weights"),
        (lambda state: setattr(state, "death", "CUDA"), "a dead engine decodes"),
        (lambda state: setattr(state, "ends_journalled", 9), "more ends were journalled"),
        (lambda state: setattr(state, "looks_answered", 9), "was not asked for"),
        (lambda state: setattr(state, "claims_handed_out", 9), "claims that were not made"),
    ],
)
def test_a_broken_invariant_is_found_at_the_next_step(bug, what):
    member = Told().claimed().decoding()
    bug(member.state)
    with pytest.raises(AssertionError, match=what):
        member.machine.step(Noticed(now_s=1.0))


@given(st.floats(0, 1e6), st.floats(0.001, 100), st.floats(0, 1))
def test_the_duties_end_within_an_interval_even_if_they_take_twice_as_long_as_the_last_time(began_s, interval_s, share):
    took_s = share * interval_s / 4
    begins = begins_s(began_s, took_s, interval_s)
    assert begins + 2 * took_s <= began_s + interval_s + 1e-6
    assert begins >= began_s + interval_s / 2 - 1e-6  # however long they take, they do not begin twice as often


def test_no_token_waits_longer_than_an_interval_where_quick_and_slow_flushes_alternate():
    member, taken_s, waited_s = Told().claimed().decoding(), 0.0, []
    action: object = Rest(2.0)
    interval_s = CONFIG.flush_interval_s
    for took_s in (0.02 * interval_s, 0.4 * interval_s) * 10:
        while not isinstance(action, WriteShard):
            if isinstance(action, Rest):
                member.now_s = max(member.now_s, action.until_s)
            action = member.tell(Lane.FLUSH)[0]
        began_s, member.now_s = member.now_s, member.now_s + took_s
        waited_s.append(member.now_s - taken_s)
        taken_s = began_s
        [action] = member.tell(Lane.FLUSH, 0)
    # The first slow one could not be known.
    assert max(waited_s[2:]) <= interval_s


def test_a_notice_that_comes_while_it_leaves_anyway_is_no_preemption():
    member = Told()
    member.tell(Lane.DECODE)
    member.tell(Lane.CLAIM)
    member.tell(Lane.CLAIM, True)  # closed
    assert isinstance(member.tell(Lane.DECODE)[0], WriteShard)
    member.machine.step(Noticed(now_s=0.0))
    assert member.tell(Lane.DECODE) == ()


def test_an_engine_that_dies_of_being_told_to_forget_is_dead_to_its_next_user():
    member = Told().claimed().decoding()
    member.state.closed = True
    action = member.decoded(5)[0]
    while not isinstance(action, AbortResponses):
        if isinstance(action, Rest):
            member.tell(Lane.FLUSH)
            member.tell(Lane.CLAIM)
        action = member.tell(Lane.DECODE)[0]
    assert member.fail(Lane.DECODE, EngineDied("gone")) == ()
    assert member.state.death is not None


@pytest.mark.parametrize("lane", BESIDE)
def test_a_broken_invariant_in_another_lane_ends_the_decode_lane(lane):
    member = Told().claimed().decoding()
    member.state.ends_journalled = 9
    member.now_s = 2.0
    assert member.tell(lane) == ()
    with pytest.raises(AssertionError, match="more ends were journalled"):
        member.decoded(5)


def test_the_load_covers_every_claim_once_a_look_has_found_nothing_astray():
    """A transfer failed after its claim; the response ended elsewhere before it was found."""
    member = Told().claimed().decoding()
    member.state.claims = Claims(dict.fromkeys(OWN, 1), 2, 0)
    assert member.state.heartbeat_state().claims == 1
    member.state.take(())
    assert member.state.heartbeat_state().claims == 2
