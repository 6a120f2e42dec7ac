"""The decode lane: a member's use of its engine, from the first claim until the member has left.

A generator of actions, which is sent the result of each. The findings of the claim lane are in the state at the next
turn, so the engine never waits for storage.
"""

import logging
from contextlib import suppress

from storage.stores.store import StorageError, StoreUnavailable
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.session.actions import (
    AbortResponses,
    BeginTurns,
    DecodeResult,
    DecodeStep,
    Lane,
    LoadWeights,
    Rest,
    RestartEngine,
    StartResponses,
    Steps,
    TakeAnswers,
    WriteHeartbeat,
    WriteShard,
)
from tasks.sampling.session.session_outcome import Preempted
from tasks.sampling.session.state import State

log = logging.getLogger(__name__)
# The longest rest while nothing is in flight, so that a notice is seen in time.
IDLE_POLL_S = 0.25
LEAVING_TIME_LIMIT_S = 60.0


def decode_lane(state: State) -> Steps:
    """Decode until the member is done, then leave.

    Raises Preempted after a notice that came before the end, EngineDied when the engine dies after engine_restarts_max
    restarts, and the error that ended a different lane. Before an error leaves, tokens are flushed and held responses
    are free for other members, if the store works.
    """
    try:
        while not (state.is_done() or state.noticed):
            state.raise_error()
            yield from _turn(state)
    except Exception:
        # The tokens that a failed engine has returned are good.
        with suppress(StorageError):
            yield from _leave(state)
        raise
    preempted = not state.is_done()
    try:
        yield from _leave(state)
    except StorageError as error:
        if not preempted:
            raise
        log.warning("slot %d: not everything could be handed over in time: %s", state.config.slot, error)
    if preempted:
        raise Preempted


def _turn(state: State) -> Steps:
    """Do what is next with the engine, or rest if there is nothing to decode."""
    holdings = state.holdings
    state.hand_over()
    if state.cut_due:
        state.cut()
    try:
        if holdings.forgotten:
            yield from _abort(state)
        elif holdings.waiting and (holdings.state == "loading" or state.death is not None):
            yield from _load(state)
        elif responses := holdings.admit(state.engine_max):
            yield from _start(state, responses)
        elif turns := holdings.turns_to_begin():
            state.note_begun(turns, (yield BeginTurns(turns)))
        elif holdings.in_flight or holdings.is_answered:
            yield from _go_on(state)
        else:
            yield Rest(state.now_s + min(IDLE_POLL_S, state.wake_interval_s))
    except EngineDied as error:
        state.begin_again(error)


def _go_on(state: State) -> Steps:
    """Take answers to turns, waiting for one only if there is nothing to decode; then decode a step."""
    holdings = state.holdings
    if holdings.is_answered:
        answers = yield TakeAnswers(0.0 if holdings.in_flight else min(IDLE_POLL_S, state.wake_interval_s))
        state.take_answers(answers)
    if holdings.in_flight:
        batch = len(holdings.in_flight)
        decoded: DecodeResult = yield DecodeStep()
        state.rate.record(batch, decoded.took_s, sum(len(delta.token_ids) for delta in decoded.deltas))
        for delta in decoded.deltas:
            holdings.record(delta)


def _load(state: State) -> Steps:
    """Give the engine the weights, after a restart if it is dead."""
    if state.death is not None:
        state.restarts += 1
        yield RestartEngine()
        state.note_restarted()
    elif (yield LoadWeights()):
        state.note_loaded()


def _start(state: State, responses: list[int]) -> Steps:
    holdings = state.holdings
    try:
        yield StartResponses(tuple((response, tuple(holdings.held[response].token_ids)) for response in responses))
    except Exception:
        # The engine has not admitted them, so there is nothing to abort.
        holdings.in_flight.difference_update(responses)
        raise


def _abort(state: State) -> Steps:
    """Have the engine forget what is not to be extended any more."""
    forgotten = tuple(sorted(state.holdings.forgotten))
    yield AbortResponses(forgotten, engine_lives=state.death is None)
    state.holdings.forgotten.difference_update(forgotten)


def _leave(state: State) -> Steps:
    """Hand everything in, and have the engine forget what is in flight: a later session must find nothing there."""
    state.leaving = True
    if state.holdings.is_answered:
        # Whatever environments raise, it must not keep tokens from being handed in.
        with suppress(Exception):
            state.take_answers((yield TakeAnswers(0.0)))
    state.holdings.stop_decoding()
    try:
        yield from _hand_in(state)
    except StorageError:
        yield from _forget_all(state)
        raise
    yield from _forget_all(state)


def _hand_in(state: State) -> Steps:
    """Write all pending tokens, and announce the state "gone", in which others may claim held responses at once.

    The first write does not wait for the claim lane's present action: tokens are safe as early as possible.
    """
    holdings = state.holdings
    if state.closed:
        holdings.let_go(set(holdings.held))
    limit_s = state.now_s + LEAVING_TIME_LIMIT_S
    if isinstance(state.doing.get(Lane.FLUSH), WriteShard):
        yield from _until_ended(state, {Lane.FLUSH}, limit_s)
    yield WriteShard(holdings.take_pending())
    yield from _until_ended(state, {Lane.FLUSH, Lane.CLAIM}, limit_s)
    if not state.announced:
        return
    yield WriteShard(holdings.take_pending())
    state.ends_journalled = holdings.ends
    holdings.state = "gone"
    yield WriteHeartbeat(state.heartbeat_state())


def _until_ended(state: State, lanes: set[Lane], limit_s: float) -> Steps:
    """Rest until these lanes have ended; raises StoreUnavailable if that takes until `limit_s`."""
    while lanes & state.doing.keys():
        if state.now_s >= limit_s:
            raise StoreUnavailable(f"a request did not end within {LEAVING_TIME_LIMIT_S:.0f} s")
        yield Rest(limit_s)


def _forget_all(state: State) -> Steps:
    """Abort what is still decoded or answered; an engine that cannot is taken for dead: its next user restarts it."""
    if state.holdings.forgotten:
        try:
            yield from _abort(state)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not hide why the member leaves
            state.note_death(error)
