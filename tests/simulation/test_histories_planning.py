"""Simulated histories of what planning asks for: they are lived through, and bugs put into it are found."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest

from simulation.judge import live_and_judge
from simulation.simulated_history import History, Speed, draw_history
from storage.records.records import TRAIN_POOL
from tasks.crew_model import rebalance
from tasks.sampling.session.claimant import Claimant
from tasks.sampling.session.holdings import Holdings
from tasks.sampling.session.state import State
from tests.judged_histories import DEFAULT_SEEDS, drawn, is_found

pytestmark = pytest.mark.slow

DRAWN = [draw_history(seed) for seed in range(60)]


def undisturbed() -> Iterator[History]:
    """The default histories without faults, handing over, and absences."""
    histories = (draw_history(seed, all_come=True, iterations=1) for seed in DEFAULT_SEEDS)
    return (history.untroubled for history in histories)


def left_to_the_trainer() -> Iterator[History]:
    """The trainer's machine seeds slowly, and for longer than its crew, which is fast, waits with nothing to do."""
    for history in undisturbed():
        places = history.plan.slots
        if history.plan.seeding is None:
            continue
        of_trainer = [place.pool == TRAIN_POOL for place in places]
        yield replace(
            history,
            plan=replace(history.plan, seeding=replace(history.plan.seeding, seeding_s=150.0)),
            speeds=tuple(Speed(base_s=6.0 if trains else 0.3, plateau=4) for trains in of_trainer),
            arrivals_s=(0.0,) * len(places),
            stays_s=tuple(150.0 if trains else None for trains in of_trainer),
            idle_timeout_s=10.0,
        )


def taken_by_strangers() -> Iterator[History]:
    """Members cut early, and machines that joined have what these give up."""
    for history in undisturbed():
        slots = len(history.plan.slots)
        joiners = len(history.speeds) - slots
        if joiners and history.plan.seeding is None:
            yield replace(
                history,
                cut_share=0.6,
                objective="gpu_seconds",
                arrivals_s=(0.0,) * (slots + joiners),
                stays_s=(None,) * (slots + joiners),
                idle_timeout_s=10.0,
            )


def cut_among_equals() -> Iterator[History]:
    """Members that are alike cut when their last responses fit into others' batches."""
    for history in undisturbed():
        slots = len(history.plan.slots)
        if history.plan.seeding is None and slots > 4:
            yield replace(
                history,
                cut_share=0.6,
                objective="gpu_seconds",
                in_flight=8,
                speeds=(Speed(base_s=0.6, plateau=8),) * slots,
                arrivals_s=(0.0,) * slots,
                stays_s=(None,) * slots,
                idle_timeout_s=30.0,
            )


def slow_among_thrifty() -> Iterator[History]:
    """One member is slow, and the others, which save machine time, may not take from it while it lives."""
    for history in undisturbed():
        if history.plan.seeding is None:
            fast = [Speed(base_s=0.3, plateau=2) for _ in history.speeds]
            yield replace(history, objective="gpu_seconds", speeds=(Speed(base_s=6.0, plateau=1), *fast[1:]))


def test_small_batches_seeding_and_cuts_are_all_drawn():
    assert sum(history.plan.seeding is not None for history in DRAWN) > 10
    assert sum(any(slot.batch_max for slot in history.plan.slots) for history in DRAWN) > 10
    assert sum(history.cut_share is not None for history in DRAWN) > 10
    assert sum(history.objective == "gpu_seconds" and history.cut_share is None for history in DRAWN) > 3


def test_where_members_would_leave_too_early_they_stay_and_some_leave_after_a_cut():
    kinds = ((left_to_the_trainer, 2), (taken_by_strangers, 3), (cut_among_equals, 5))
    outcomes = [live_and_judge(history) for kind, number in kinds for history in islice(kind(), number)]
    assert [outcome.broken for outcome in outcomes] == [[]] * len(outcomes)
    assert sum(outcome.counts["members that left after a cut"] for outcome in outcomes) >= 2


def test_a_crew_that_leaves_before_the_trainers_machine_hands_over_is_found(monkeypatch):
    monkeypatch.setattr(Claimant, "_is_from_trainer", lambda *_: False)
    assert is_found(left_to_the_trainer(), livelock=1)


def test_a_member_that_leaves_after_a_cut_whoever_has_its_work_is_found(monkeypatch):
    answers = Claimant.own_unit_ended
    monkeypatch.setattr(
        Claimant,
        "own_unit_ended",
        lambda self, known, *, cuts, has_cut: has_cut or answers(self, known, cuts=cuts, has_cut=has_cut),
    )
    assert is_found(taken_by_strangers(), livelock=1)


def test_members_that_cut_into_each_other_are_found(monkeypatch):
    """Each takes the room of all others, also of those that hold less and cut themselves."""

    def should_cut(state, seen):
        holdings, share = state.holdings, state.config.cut_share
        if share is None or holdings.state != "working" or holdings.waiting or holdings.released:
            return False
        held = set(holdings.held)
        total = len(held | holdings.own | set(holdings.ended))
        rooms = [other.room for other in seen.working]
        return bool(held) and rebalance.should_cut(total - len(held), total, len(held), rooms, share)

    monkeypatch.setattr(State, "_should_cut", should_cut)
    assert is_found(drawn(lambda history: history.cut_share is not None), livelock=2)


def test_a_member_that_cuts_again_and_again_is_found(monkeypatch):
    due = State.cut_due.fget
    monkeypatch.setattr(State, "has_cut", property(lambda _: False, lambda *_: None), raising=False)
    monkeypatch.setattr(State, "cut_due", property(due))
    assert is_found(cut_among_equals(), livelock=1)


def test_a_member_that_takes_from_the_living_though_it_is_to_leave_is_found(monkeypatch):
    choose = rebalance.next_transfer
    monkeypatch.setattr(
        rebalance, "next_transfer", lambda seeker, *others: choose(replace(seeker, free_only=False), *others)
    )
    assert is_found(slow_among_thrifty(), livelock=1)


def test_a_batch_that_is_larger_than_the_plan_says_is_found(monkeypatch):
    monkeypatch.setattr(Holdings, "batch_limit", lambda _, engine_max: engine_max)
    assert is_found(drawn(lambda history: any(slot.batch_max for slot in history.plan.slots)), error=1)
