"""Simulated histories of what planning asks for: they are lived through, and bugs put into it are found."""

from dataclasses import replace

import pytest

from simulation.judge import live_and_judge
from simulation.simulated_history import draw_history
from tasks.planning import rebalance
from tasks.sampling.session.claimant import Claimant
from tasks.sampling.session.holdings import Holdings
from tests.judged_histories import all_come, is_found

pytestmark = pytest.mark.slow

DRAWN = [draw_history(seed) for seed in range(60)]
# In these a member would leave too early, were it allowed to; in others some leave after a cut, as they may.
HANDED_OVER_LATE, TAKEN_BY_STRANGERS, LEFT_AFTER_A_CUT = (852,), (201, 255, 297, 339, 379), (69, 113, 172)


def test_small_batches_seeding_and_cuts_are_all_drawn():
    assert sum(history.plan.seeding is not None for history in DRAWN) > 10
    assert sum(any(slot.batch_max for slot in history.plan.slots) for history in DRAWN) > 10
    assert sum(history.cut_share is not None for history in DRAWN) > 10
    assert sum(history.objective == "gpu_seconds" and history.cut_share is None for history in DRAWN) > 3


def test_where_members_would_leave_too_early_they_stay_and_some_leave_after_a_cut():
    seeds = HANDED_OVER_LATE + TAKEN_BY_STRANGERS + LEFT_AFTER_A_CUT
    outcomes = [live_and_judge(draw_history(seed, all_come=True)) for seed in seeds]
    assert [outcome.broken for outcome in outcomes] == [[]] * len(outcomes)
    assert sum(outcome.counts["members that left after a cut"] for outcome in outcomes) >= 3


def test_a_claim_that_comes_to_light_late_is_in_no_heartbeat_before_its_response_is_held():
    """In this history another member left too early when it was."""
    assert live_and_judge(draw_history(704)).broken == []


def test_a_crew_that_leaves_before_the_trainers_machine_hands_over_is_found(monkeypatch):
    monkeypatch.setattr(Claimant, "_is_from_trainer", lambda *_: False)
    assert is_found(all_come(HANDED_OVER_LATE), livelock=1)


def test_a_member_that_leaves_after_a_cut_whoever_has_its_work_is_found(monkeypatch):
    answers = Claimant.own_unit_ended
    monkeypatch.setattr(
        Claimant,
        "own_unit_ended",
        lambda self, *, cuts, has_cut: has_cut or answers(self, cuts=cuts, has_cut=has_cut),
    )
    assert is_found(all_come(TAKEN_BY_STRANGERS), livelock=3)


def test_a_member_that_takes_from_the_living_though_it_is_to_leave_is_found(monkeypatch):
    choose = rebalance.next_transfer
    monkeypatch.setattr(
        rebalance, "next_transfer", lambda seeker, *others: choose(replace(seeker, free_only=False), *others)
    )
    assert is_found(all_come((51, 99, 109, 239, 272)), livelock=3)


def test_a_batch_that_is_larger_than_the_plan_says_is_found(monkeypatch):
    monkeypatch.setattr(Holdings, "batch_limit", lambda _, engine_max: engine_max)
    assert is_found(all_come((8, 9, 14, 23, 24, 30)), error=4)
