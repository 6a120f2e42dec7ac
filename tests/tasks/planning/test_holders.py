"""Which part decodes what: evenly among those that begin together, what waits for those that come, and what is left."""

import math
from dataclasses import replace

import pytest

from tasks.planning.holders import Part, fullness, phases, shares_of
from tasks.planning.step_time import StepTime

RISING = StepTime(((1, 0.01), (64, 0.02)))
# No more tokens per second beyond a batch of 8.
FULL_AT_8 = StepTime(((1, 0.01), (8, 0.02), (64, 0.16)))
EARLY = Part(count=2, step_time=RISING, responses_max=64, start_s=0.0, end_s=math.inf, is_crew=True)
LATE = replace(EARLY, count=1, start_s=9.0)
ENGINES = replace(EARLY, count=4, end_s=20.0, is_crew=False)


def test_parts_come_and_go():
    found = list(phases([EARLY, LATE, ENGINES]))
    assert [when for _, when in found] == [(0.0, 9.0), (9.0, 20.0), (20.0, math.inf)]
    assert [len(parts) for parts, _ in found] == [2, 3, 2]


def test_those_that_begin_together_share_evenly():
    assert shares_of([EARLY, ENGINES], {}, 60.0) == {EARLY: pytest.approx(1 / 3), ENGINES: pytest.approx(2 / 3)}


def test_who_comes_later_gets_what_waits_and_else_only_what_is_decoded_no_sooner():
    before = {EARLY: 1.0}
    # 160 responses, of which 128 have a place.
    assert shares_of([EARLY, LATE], before, 160.0)[LATE] == pytest.approx(32 / 160)
    assert shares_of([EARLY, LATE], before, 100.0)[LATE] == 0.0
    full = replace(EARLY, step_time=FULL_AT_8)
    assert shares_of([full, LATE], {full: 1.0}, 20.0)[LATE] == pytest.approx(2 * 2 / 20)


def test_the_first_that_looks_takes_what_is_left_behind_as_far_as_it_has_room():
    # The engines leave 40 of 60 responses; each member has 10 of its own.
    before = {EARLY: 1 / 3, ENGINES: 2 / 3}
    assert fullness({EARLY: 1.0}, before, 60.0) == pytest.approx(50.0 / 30.0)
    crowded = replace(EARLY, responses_max=35)
    before = {crowded: 1 / 3, ENGINES: 2 / 3}
    assert fullness({crowded: 1.0}, before, 60.0) == pytest.approx(RISING.plateau(35) / 30.0)
    # One that comes as they stop takes all, and one alone in any case.
    assert fullness({EARLY: 1.0}, {ENGINES: 1.0}, 40.0) == pytest.approx(2.0)
    assert fullness({LATE: 1.0}, {ENGINES: 1.0}, 40.0) == 1.0


def test_members_that_idled_share_what_is_left_behind():
    idle = replace(EARLY, count=2)
    assert fullness({idle: 1.0}, {idle: 0.0, ENGINES: 1.0}, 40.0) == 1.0
    # Beside two with 10 responses each, they get 10 of the engines' 20.
    busy = {EARLY: 0.5, idle: 0.0, ENGINES: 0.5}
    assert fullness({EARLY: 0.5, idle: 0.5}, busy, 40.0) == 1.0
    assert fullness({EARLY: 1.0}, {EARLY: 0.5, ENGINES: 0.5}, 40.0) == pytest.approx(30.0 / 20.0)


def test_of_more_than_it_decodes_at_once_the_others_take_their_part():
    full = replace(EARLY, step_time=FULL_AT_8, count=10)
    plateau = FULL_AT_8.plateau(64)
    assert fullness({full: 1.0}, {ENGINES: 1.0}, 60.0) == pytest.approx(plateau / 6.0)


def test_nobody_is_fuller_where_nothing_is_left_behind():
    assert fullness({EARLY: 1.0}, {EARLY: 1.0, ENGINES: 0.0}, 60.0) == 1.0
    assert fullness({EARLY: 1.0}, {ENGINES: 1.0}, 0.0) == 1.0
