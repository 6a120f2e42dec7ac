"""The parts of benchmarks.gpu in a given number of minutes, on a clock that the parts themselves turn."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.part import Outcome
from benchmarks.gpu.schedule import chosen, lines, run_in_turn, turns

PARTS = {"identity": 7.0, "price": 4.0, "head": 2.0}


class Machine:
    """Runs parts that take some minutes each, ends one at its limit, and remembers what was told."""

    def __init__(self, took):
        self._took = took
        self.now_s = 0.0
        self.told = []

    def run(self, part, limit_s):
        seconds = 60 * self._took[part]
        self.now_s += min(seconds, limit_s)
        return Outcome("measured", {}) if seconds <= limit_s else Outcome("failed", {}, "too long")

    def in_turn(self, minutes, parts=PARTS):
        return run_in_turn(minutes, parts, self.run, lambda part, _: self.told.append(part), lambda: self.now_s)


def test_the_schedule_says_when_each_part_begins_and_what_does_not_fit():
    assert [(turn.part, turn.begins) for turn in turns(13, PARTS)] == [("identity", 0), ("price", 7), ("head", 11)]
    assert list(lines(9.5, PARTS)) == [
        "9.5 minutes; a part ends at the latest after:",
        "   7.0 min  identity, from minute 0",
        "   2.0 min  head, from minute 7",
        "  only if others end sooner: price",
    ]


def test_minutes_that_a_part_leaves_go_to_later_ones():
    quick = Machine({"identity": 1.0, "price": 4.0, "head": 2.0})
    assert {outcome.status for outcome in quick.in_turn(9.5).values()} == {"measured"}
    assert quick.now_s == 7 * 60


def test_a_part_that_hangs_is_ended_and_what_no_longer_fits_is_skipped_with_a_reason():
    hangs = Machine({"identity": 1e9, "price": 4.0, "head": 2.0})
    found = hangs.in_turn(9.5)
    assert [outcome.status for outcome in found.values()] == ["failed", "skipped", "measured"]
    assert found["price"].reason == "2.5 minutes are left, and it may take 4"
    assert hangs.told == list(PARTS)


@pytest.mark.parametrize("parts", [{"head": 2.0}, {"identity": 7.0, "price": 4.0}])
def test_a_plan_of_exactly_the_minutes_of_its_parts_runs_them_all(parts):
    """Also if a clock goes on between two readings, and no part ends sooner."""
    machine, readings = Machine(parts), itertools.count()
    minutes = sum(parts.values())
    found = run_in_turn(minutes, parts, machine.run, lambda *_: None, lambda: machine.now_s + 0.001 * next(readings))
    assert all(outcome.reason in ("", "too long") for outcome in found.values())
    assert machine.now_s <= 60 * minutes


@given(
    parts=st.dictionaries(st.sampled_from("abcdef"), st.floats(0.5, 8)),
    took=st.lists(st.floats(0, 20), min_size=6, max_size=6),
    minutes=st.floats(0, 45),
)
def test_no_plan_takes_longer_than_its_minutes(parts, took, minutes):
    machine = Machine(dict(zip("abcdef", took, strict=True)))
    found = machine.in_turn(minutes, parts)
    assert machine.now_s <= 60 * minutes + 1e-6
    assert list(found) == machine.told == list(parts)
    fits = {turn.part for turn in turns(minutes, parts)}
    # The first part always gets its minutes if they are there at all.
    assert not parts or (next(iter(parts)) in fits) == (next(iter(parts.values())) <= minutes)


@pytest.mark.parametrize(
    ("asked", "found"), [([], list(PARTS)), (["all"], list(PARTS)), (["head", "identity"], ["identity", "head"])]
)
def test_parts_run_in_the_order_of_their_worth(asked, found):
    assert list(chosen(asked, PARTS)) == found
