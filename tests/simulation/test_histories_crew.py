"""Simulated histories in which members do not come: the trainer's machine generates, and bugs in that are found."""

import math
from collections import Counter
from contextlib import suppress
from itertools import islice

import pytest

from simulation.judge import live_and_judge
from simulation.judge_absence import check_latecomers
from simulation.ledger import Ledger
from simulation.simulated_history import draw_history
from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.records import TRAIN_POOL, ClosedRecord
from tasks.sampling.session import decode_lane
from tasks.sampling.session.actions import ReadClosed
from tasks.sampling.session.crew_watch import CrewWatch
from tasks.sampling.session.storage_lanes import ClaimLane
from tests.journals import beat
from tests.judged_histories import drawn, is_found

DRAWN = [draw_history(seed) for seed in range(160)]
ABSENT = [history for history in DRAWN if history.absence is not None]


def crew_of(history):
    return {place.slot for place in history.plan.slots if place.pool != TRAIN_POOL}


def never_comes(history):
    """Whether no slot of the crew ever starts; others may join."""
    return history.absence is not None and history.absence.never == crew_of(history)


def only_absent(history):
    """Whether nothing is wrong but that members do not come: whoever waits for them then waits to the end."""
    return history.absence is not None and history == history.untroubled


def test_everything_that_flyte_may_not_start_is_drawn():
    assert len(DRAWN) / 3 < len(ABSENT) < 2 * len(DRAWN) / 3
    drawn = [history.absence for history in ABSENT]
    assert sum(bool(absence.never) for absence in drawn) > 10
    assert sum(bool(absence.late_s) for absence in drawn) > 10
    assert sum(bool(absence.lives_s) for absence in drawn) > 10
    durations_s = [outage.duration_s for absence in drawn for outage in absence.outages]
    assert sum(map(math.isinf, durations_s)) > 5
    assert sum(not math.isinf(duration_s) for duration_s in durations_s) > 10


@pytest.mark.slow
def test_where_no_slot_comes_the_trainers_machine_generates():
    outcomes = [live_and_judge(history) for history in islice(drawn(never_comes), 5)]
    assert [outcome.broken for outcome in outcomes] == [[]] * 5
    assert sum(bool(outcome.counts["the trainer's machine generates"]) for outcome in outcomes) >= 3


def has_outages(history):
    """Whether all members are lost at once and the trainer is struck, too."""
    struck = any(strike.kind.startswith("trainer") for strike in history.strikes)
    return history.absence is not None and len(history.absence.outages) > 1 and struck


@pytest.mark.slow
def test_the_trainers_machine_takes_turns_with_members_and_is_struck_like_them():
    outcomes = [live_and_judge(history) for history in islice(drawn(has_outages), 20)]
    counts = sum((outcome.counts for outcome in outcomes), Counter())
    assert [outcome.broken for outcome in outcomes] == [[]] * len(outcomes)
    assert counts["the trainer's machine generates"] > 5
    assert counts["the trainer's machine hands over"] > 1
    for what in ("crew outages", "rollout maps noted as ended"):
        assert counts[what] > 5, what
    assert counts["crew outages for ever"] > 0
    assert counts["the trainer's machine ended while it generated: Crashed"] > 0
    assert 0.3 < max(outcome.wait_to_bound for outcome in outcomes) < 1


@pytest.mark.slow
def test_a_trainer_that_does_not_generate_again_is_found(monkeypatch):
    monkeypatch.setattr(CrewWatch, "check", lambda *_: None)
    assert is_found(drawn(only_absent), waits=1, livelock=1)


@pytest.mark.slow
def test_a_watch_that_takes_the_dead_for_living_is_found(monkeypatch):
    def present(watch, _ended):
        return {name: sign for name, sign in watch._signs.items() if sign.record.pool != TRAIN_POOL}

    monkeypatch.setattr(CrewWatch, "_present", present)
    assert is_found(drawn(only_absent), waits=1)


@pytest.mark.slow
def test_a_helping_member_that_hands_over_to_the_dead_is_found(monkeypatch):
    def lives(watch):
        watch._look()
        return any(sign.record.pool != TRAIN_POOL for sign in watch._signs.values())

    monkeypatch.setattr(CrewWatch, "lives", lives)
    monkeypatch.setattr(CrewWatch, "works", lives)
    assert is_found(drawn(only_absent), livelock=1)


def sent(steps, first):
    """The rest of the steps, the next of which is sent `first`."""
    result = first
    with suppress(StopIteration):
        while True:
            result = yield steps.send(result)


@pytest.mark.slow
def test_a_pod_that_claims_although_it_comes_after_closing_is_found(monkeypatch):
    claim = ClaimLane._claim

    def claim_blindly(lane):
        steps = claim(lane)
        assert next(steps) == ReadClosed()
        yield from sent(steps, False)

    monkeypatch.setattr(ClaimLane, "_claim", claim_blindly)
    assert is_found(drawn(lambda history: history.absence is not None and history.absence.late_s), late=1)


@pytest.mark.slow
def test_a_helping_member_that_keeps_its_work_when_it_hands_over_is_found(monkeypatch):
    leave = decode_lane._leave

    def stay(state):
        if state.config.pool != TRAIN_POOL:
            yield from leave(state)
        state.leaving = True

    monkeypatch.setattr(decode_lane, "_leave", stay)
    assert is_found(drawn(only_absent), error=1)


@pytest.mark.parametrize("late_s", [0.1, 59.0, 600.0])
def test_who_comes_a_moment_after_closing_is_found_like_one_who_comes_much_later(late_s):
    clock = ManualClock()
    ledger = Ledger(clock.monotonic)
    records.put(ledger.view("00001-0"), layout.alive(0, "00001-0"), beat("00001-0", number=1))
    clock.advance(100.0)
    records.commit(ledger.view("trainer-1"), layout.closed(0), ClosedRecord(iteration=0, reason="done"))
    clock.advance(late_s)
    records.put(ledger.view("00001-0"), layout.alive(0, "00001-0"), beat("00001-0", number=2))
    check_latecomers(ledger)
    assert ledger.broken == []
    records.put(ledger.view("00099-0"), layout.alive(0, "00099-0"), beat("00099-0", number=1))
    check_latecomers(ledger)
    assert [rule.split(":")[0] for rule in ledger.broken] == ["late"]


def test_who_comes_after_closing_and_only_beats_is_found():
    ledger = live_and_judge(draw_history(0, all_come=True)).ledger
    records.put(ledger.view("00099-0"), layout.alive(0, "00099-0"), beat("00099-0", number=1))
    check_latecomers(ledger)
    assert [rule.split(":")[0] for rule in ledger.broken] == ["late"]
