"""One rollout of the event model: sums by hand, what is the same however time passes, and who stops when."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.crew_model import crew
from tasks.crew_model.crew_member import EngineModel
from tasks.crew_model.ownership import CrewRules
from tasks.crew_model.rollout_model import PlannedMember, modelled_rollout
from tasks.crew_model.step_time import StepTime

CURVE = StepTime(((1, 0.1), (8, 0.12), (64, 0.5)))
ENGINE = EngineModel.of(CURVE, 16, math.inf)
RULES = CrewRules(flush_interval_s=5.0, heartbeat_interval_s=5.0, claim_ttl_s=30.0)


def a_crew(*dealt: tuple[int, ...], engine: EngineModel = ENGINE) -> list[PlannedMember]:
    return [PlannedMember(engine=engine, start_s=0.0, groups=groups) for groups in dealt]


def test_a_rollout_lasts_as_long_as_its_steps():
    lengths = np.array([[100, 40], [100, 40]])
    found = modelled_rollout(lengths, a_crew((0, 1)), RULES)
    assert found.ended_s == pytest.approx(40 * CURVE.step_s(4) + 60 * CURVE.step_s(2))
    assert found.ends_s == pytest.approx(found.ended_s)
    assert found.member_s == (pytest.approx(found.ended_s),)


def test_a_member_takes_what_another_that_is_not_there_yet_has_not_claimed():
    lengths = np.full((4, 2), 300)
    late = a_crew((0, 1), (2, 3))
    late[1] = replace(late[1], start_s=1000.0)
    found = modelled_rollout(lengths, late, RULES)
    assert found.ended_s == pytest.approx(300 * CURVE.step_s(8))
    assert found.moved == 4
    assert found.member_s[1] == 0.0


def test_an_engine_that_stops_leaves_its_responses_and_stays_while_it_is_alone():
    lengths = np.full((2, 2), 300)
    members = a_crew((0,), (1,))
    members[1] = replace(members[1], in_crew=False, stop_s=10.0)
    found = modelled_rollout(lengths, members, RULES)
    assert found.moved == 2
    assert found.member_s[1] == pytest.approx(10.0)
    alone = modelled_rollout(lengths[:1], [replace(members[1], groups=(0,))], RULES)
    assert alone.ended_s == pytest.approx(300 * CURVE.step_s(2))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 400), min_size=2, max_size=2), min_size=1, max_size=10),
    st.lists(st.floats(0, 60), min_size=1, max_size=4),
    st.integers(0, 5),
)
def test_rounds_of_looks_that_find_nothing_may_be_left_out(lengths, starts_s, seed):
    """With every round played, as where a look sees only some of the members, the rollout is the same."""
    members = [
        PlannedMember(engine=ENGINE, start_s=start_s, groups=tuple(range(place, len(lengths), len(starts_s))))
        for place, start_s in enumerate(starts_s)
    ]
    found = modelled_rollout(np.array(lengths), members, RULES, seed=seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "LOOKS_MAX", 0)
        every = modelled_rollout(np.array(lengths), members, RULES, seed=seed)
    assert found.ended_s == pytest.approx(every.ended_s, rel=0.05)
    if len(members) < 3:
        # With two members no order of looks is drawn.
        assert found.ends_s == pytest.approx(every.ends_s)
        assert found.moved == every.moved


def test_a_response_that_stands_for_several_takes_as_long_as_they_do():
    lengths = np.full((8, 8), 100)
    whole = modelled_rollout(lengths, a_crew(tuple(range(8)), engine=EngineModel.of(CURVE, 64, 1e3)), RULES)
    fourth = EngineModel.standing_for(4.0, CURVE, 64, 1e3)
    part = modelled_rollout(lengths[:2], a_crew((0, 1), engine=fourth), RULES)
    assert part.ended_s == pytest.approx(whole.ended_s)
    # Of more than fit, each takes as much longer.
    scarce = EngineModel.standing_for(8.0, CURVE, 4, 1e3)
    assert scarce.responses_max == 1
    assert scarce.step_s[1] == pytest.approx(2 * CURVE.step_s(4))
