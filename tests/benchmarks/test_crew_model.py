"""The event model beside production's sessions, on a few drawn plans; and a model that is wrong is found."""

import pytest

from benchmarks.crew_model import WITHIN, by_sessions, compared, drawn, targets
from tasks.crew_model.crew_member import EngineModel

PLANS = (4, 8, 17)


def test_a_plan_is_its_number():
    assert drawn(3) == drawn(3) != drawn(4)
    assert by_sessions(drawn(46)) == by_sessions(drawn(46))


@pytest.mark.slow
def test_the_model_lasts_as_long_as_production():
    rows = [compared(number) for number in PLANS]
    assert all(target.met for target in targets(rows)), rows


def test_a_model_whose_steps_are_too_short_is_found(monkeypatch):
    of = EngineModel.of
    monkeypatch.setattr(EngineModel, "of", lambda curve, most, prefill: of(curve.scaled(0.75), most, prefill))
    row = compared(46)
    assert row["makespan_ratio"] < 1 - WITHIN
    assert not any(target.met for target in targets([row]) if target.name.startswith("makespan"))
