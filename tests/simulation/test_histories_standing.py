"""Simulated crews that stand: they are lived through, and bugs put into how members go on are found."""

from collections import Counter
from contextlib import suppress
from itertools import islice

import pytest

from simulation.judge import live_and_judge
from simulation.simulated_history import draw_history
from tasks.sampling.session import decode_lane
from tasks.sampling.session.actions import ReadClosed
from tasks.sampling.session.performer import Performer
from tasks.sampling.session.route import Route
from tasks.sampling.session.state import State
from tasks.sampling.session.storage_lanes import ClaimLane
from tests.judged_histories import DEFAULT_SEEDS, drawn, is_found

pytestmark = pytest.mark.slow


def standing(*, ahead=None, seeds=DEFAULT_SEEDS):
    """The histories of standing crews, of two and of three iterations."""
    for iterations in (3, 2):
        yield from drawn(
            lambda history: history.stands and ahead in (None, bool(history.ahead)), iterations=iterations, seeds=seeds
        )


def test_standing_crews_are_drawn():
    histories = [draw_history(seed) for seed in DEFAULT_SEEDS]
    stand = [history for history in histories if history.stands]
    assert len(stand) > 30
    assert sum(bool(history.ahead) for history in stand) > 5
    assert min(history.iterations for history in stand) == 2
    assert all(history.absence is None and history.objective == "makespan" for history in stand)


def test_standing_crews_are_lived_through_and_are_eventful():
    outcomes = [live_and_judge(history) for history in islice(standing(), 6)]
    counts = sum((outcome.counts for outcome in outcomes), Counter())
    assert [outcome.broken for outcome in outcomes] == [[]] * 6
    for what in (
        "standing: done",
        "standing: Crashed",
        "standing: Preempted",
        "standing members followed while frozen",
        "weights loaded while standing by",
    ):
        assert counts[what] > 0, what
    # Each goes from iteration to iteration.
    assert counts["sessions of standing members"] > counts["standing members started"]


def test_a_member_that_goes_on_with_the_weights_of_the_iteration_before_is_found(monkeypatch):
    loaded = Performer._loaded
    monkeypatch.setattr(Performer, "_loaded", lambda one: one._engine.weight_version is not None or loaded(one))
    assert is_found(standing(), changed=1)


def test_a_member_that_goes_on_before_its_tokens_are_journalled_is_found(monkeypatch):
    hand_in, may_leave = decode_lane._hand_in, State._may_leave

    def write_nothing(state):
        if state.config.standing:
            state.holdings.take_pending()
        yield from hand_in(state)

    def goes_on(state, idle_s):
        return state.enough if state.config.standing else may_leave(state, idle_s)

    monkeypatch.setattr(decode_lane, "_hand_in", write_nothing)
    monkeypatch.setattr(State, "_may_leave", goes_on)
    # It takes a notice in the moments in which a member goes on: one history in ten has that.
    assert is_found(standing(seeds=range(DEFAULT_SEEDS.stop, 3 * DEFAULT_SEEDS.stop)), promise=1)


def test_a_member_that_does_not_wait_for_the_next_plan_is_found(monkeypatch):
    monkeypatch.setattr(Route, "is_over", property(lambda _: True))
    assert is_found(standing(), livelock=1)


def test_a_member_that_leaves_the_last_iteration_before_the_responses_of_its_slot_have_ended_is_found(monkeypatch):
    look = ClaimLane._look_at_own

    def take_them_for_ended(lane):
        yield from look(lane)
        lane._state.own_ended = True

    monkeypatch.setattr(ClaimLane, "_look_at_own", take_them_for_ended)
    assert is_found(standing(), livelock=1)


def test_a_zombie_that_claims_in_iterations_that_are_over_is_found(monkeypatch):
    claim = ClaimLane._claim

    def claim_blindly(lane):
        steps = claim(lane)
        assert next(steps) == ReadClosed()
        result = False
        with suppress(StopIteration):
            while True:
                result = yield steps.send(result)

    monkeypatch.setattr(Route, "_is_done", lambda route, iteration: iteration in route._left)
    monkeypatch.setattr(ClaimLane, "_claim", claim_blindly)
    assert is_found(standing(), late=1)


def test_a_member_that_does_not_come_back_for_what_a_lost_one_held_is_found(monkeypatch):
    following = Route.next

    def only_forward(route):
        plan = following(route)
        return None if plan is None or plan.iteration <= route._entered else plan

    monkeypatch.setattr(Route, "next", only_forward)
    # Only where the next iteration begins before this one is closed can all others have left a response behind.
    # That is rare.
    assert is_found(standing(ahead=True, seeds=range(2000)), livelock=1)
