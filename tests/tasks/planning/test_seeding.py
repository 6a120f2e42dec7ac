"""RLBoost's seeding controller on its own step model: it must come to the closed form, and stay there."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from storage.records.planning_records import SeedingRecord
from tasks.configuration.planning import PlanningConfig
from tasks.planning.capacity import StepWaits
from tasks.planning.seeding import (
    SEEDING_S_MIN,
    closed_form_s,
    generates_again,
    members_needed,
    next_seeding,
    work_engine_s,
)
from tests.planning_requests import seeding_constants, waits

# Fitted to the starting points in the published code for 14B (arXiv 2510.19225, PolyRL 836120a).
WORK_S, TRAIN_S, TRANSFER_S, ENGINES = 2130.0, 410.0, 5.0, 4
PUBLISHED_S = {1: 346, 2: 212, 3: 145, 4: 60, 5: 8, 6: 5}
SETTINGS = PlanningConfig(seeding="auto")


def played(seeding_s: float | None, members: int, *, work_s=WORK_S, train_s=TRAIN_S, x=TRANSFER_S, engines=ENGINES):
    """The waits of one iteration of the step model: members decode from x on, the trainer trains after seeding."""
    if seeding_s is None or not members:
        return waits(train_s=train_s, rollout_s=0.0, members=0.0, members_at_end=0)
    seeding_s = min(seeding_s, work_s / engines)
    decode_s = max(0.0, work_s - engines * seeding_s) / members
    late_s = x + decode_s - (seeding_s + train_s)
    return StepWaits(
        wait_train_s=max(0.0, late_s),
        wait_remote_s=max(0.0, -late_s),
        train_s=train_s,
        rollout_s=decode_s,
        members=float(members),
        members_at_end=members,
    )


def steps(crews, before=None, last=None, *, x=TRANSFER_S, engines=ENGINES, **plant):
    """The seeding time of each iteration, given how many members each has."""
    taken = []
    for members in crews:
        before = next_seeding(
            before,
            last,
            members=members,
            engines=engines,
            transfer_s=x,
            train_s=plant.get("train_s", TRAIN_S) if last else None,
        )
        last = played(before.seeding_s, members, x=x, engines=engines, **plant)
        taken.append(before)
    return taken


def fixed_point(members: int) -> float:
    return closed_form_s(WORK_S, TRAIN_S, TRANSFER_S, ENGINES, members, SEEDING_S_MIN)


def test_closed_form_fits_the_published_starting_points():
    wrong = [fixed_point(members) - published for members, published in PUBLISHED_S.items()]
    assert np.sqrt(np.mean(np.square(wrong))) == pytest.approx(7.0, abs=0.5)
    assert members_needed(WORK_S, TRAIN_S) == pytest.approx(5.2, abs=0.01)
    colocated_s = WORK_S / ENGINES + TRAIN_S
    assert colocated_s / (TRAIN_S + fixed_point(6)) == pytest.approx(2.27, abs=0.01)


@pytest.mark.parametrize("members", range(7))
def test_it_comes_to_the_closed_form(members):
    last = steps([members] * 30)[-1]
    if members == 0:
        assert last.seeding_s is None
    elif members >= members_needed(WORK_S, TRAIN_S):
        assert last.seeding_s == 0.0
    else:
        assert last.seeding_s == pytest.approx(fixed_point(members), abs=0.01)


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.floats(100, 5000),
    st.floats(20, 600),
    st.floats(0, 20),
    st.floats(0, 500),
)
def test_it_comes_to_the_closed_form_from_anywhere(engines, members, work_s, train_s, x, initial_s):
    """Line 9 as it is printed diverges where engines / members exceeds 2 eta - 1."""
    assume(abs(members - members_needed(work_s, train_s)) > 1e-6)
    with seeding_constants(initial_s):
        taken = steps([members] * 150, x=x, engines=engines, work_s=work_s, train_s=train_s)
    if members >= members_needed(work_s, train_s):
        assert taken[-1].seeding_s == 0.0
    else:
        fixed_s = closed_form_s(work_s, train_s, x, engines, members, SEEDING_S_MIN)
        assert taken[-1].seeding_s == pytest.approx(min(fixed_s, work_s / engines), rel=1e-3, abs=0.1)


def test_what_suited_so_many_members_is_there_at_once_when_they_are_back():
    crews = [4] * 20 + [1] * 20 + [4] * 2
    taken = [record.seeding_s for record in steps(crews)]
    assert taken[19] == pytest.approx(fixed_point(4), abs=0.1)
    assert taken[39] == pytest.approx(fixed_point(1), abs=0.1)
    assert taken[40] == pytest.approx(fixed_point(4), abs=0.1)


def test_six_one_six():
    taken = [record.seeding_s for record in steps([6] * 5 + [1] * 3 + [6] * 2 + [1])]
    assert taken[1:5] == [0.0] * 4
    # One member was never there: the closed form of the work that was measured, from the first iteration on.
    assert taken[5:8] == [pytest.approx(fixed_point(1), abs=0.01)] * 3
    assert taken[8:10] == [0.0] * 2
    assert taken[10] == pytest.approx(fixed_point(1), abs=0.01)


def test_memory_survives_an_iteration_without_members():
    taken = steps([4] * 20 + [0] * 2 + [4])
    assert [record.seeding_s for record in taken[20:22]] == [None, None]
    assert taken[22].seeding_s == pytest.approx(fixed_point(4), abs=0.1)


def test_nothing_is_remembered_of_an_iteration_in_which_members_came_or_went():
    before = SeedingRecord(seeding_s=50.0, members=4, memory={"4": 60.0})

    def following(last):
        return next_seeding(before, last, members=4, engines=4, transfer_s=0.0, train_s=None)

    changed = following(waits(wait_train_s=40.0, members=4.9, members_at_end=4))
    assert changed == before.__class__(seeding_s=60.0, members=4, memory={"4": 60.0})
    kept = following(waits(wait_train_s=30.0, members=4.2, members_at_end=4))
    assert kept.seeding_s == kept.memory["4"] == pytest.approx(60.0)


def test_the_first_time_and_the_floor():
    first = next_seeding(None, None, members=2, engines=4, transfer_s=0.0, train_s=None)
    assert first == SeedingRecord(seeding_s=150.0, members=2)
    low = next_seeding(
        replace(first, seeding_s=6.0),
        waits(wait_remote_s=99.0, members=2.0, members_at_end=2),
        members=2,
        engines=4,
        transfer_s=0.0,
        train_s=None,
    )
    assert low.seeding_s == SEEDING_S_MIN


def test_work_is_not_known_of_an_iteration_without_members():
    assert work_engine_s(None, None, 4, 0.0) is None
    assert work_engine_s(waits(), SeedingRecord(seeding_s=None, members=0), 4, 0.0) is None
    assert work_engine_s(waits(rollout_s=10.0, members=3.0), SeedingRecord(seeding_s=5.0, members=3), 4, 0.0) == 50.0


def test_what_the_trainer_generated_counts_whatever_was_planned():
    """As it was measured, in the middle of an iteration, too, and where members came after all."""
    told = waits(rollout_s=10.0, members=3.0, generated_s=7.0)
    for seeding_s in (None, 0.0, 5.0):
        assert work_engine_s(told, SeedingRecord(seeding_s=seeding_s, members=3), 4, 1.0, 2.0) == 10 * 3 + 7 * 4
    assert work_engine_s(replace(told, generated_s=0.0), SeedingRecord(seeding_s=5.0, members=3), 4) == 30.0


def test_it_generates_again_when_it_has_been_alone_for_long_enough():
    assert not generates_again(119.9, 120.0, SETTINGS)
    assert generates_again(120.0, 120.0, SETTINGS)
    assert generates_again(10.0, 10.0, SETTINGS)


def test_it_generates_again_at_once_when_none_of_the_crew_will_come():
    assert generates_again(0.0, 120.0, SETTINGS, crew_ended=True)


@pytest.mark.parametrize("crew_ended", [False, True])
def test_it_never_generates_again_with_seeding_off(crew_ended):
    assert not generates_again(1e9, 120.0, PlanningConfig(), crew_ended=crew_ended)


def test_the_trainer_did_not_generate_for_longer_than_there_was_work():
    """With 500 s allowed and everything done after 20, the next iteration begins from there."""
    before = SeedingRecord(seeding_s=500.0, members=3)
    last = waits(rollout_s=15.0, members=3.0, members_at_end=3, wait_remote_s=30.0)
    assert work_engine_s(last, before, 4, 5.0) == 15 * 3 + 20 * 4
    after = next_seeding(before, last, members=3, engines=4, transfer_s=5.0, train_s=None)
    assert after.seeding_s == pytest.approx(20.0 - 30.0 / 3)
