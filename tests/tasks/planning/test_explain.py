"""Decisions as people read them, and as reports are compared with them."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given

from storage.records import canonical
from storage.records.planning_records import SeedingRecord
from tasks.configuration.planning import PlanningConfig
from tasks.crew_model.step_time import NOMINAL
from tasks.planning.capacity import TrainerCapacity
from tasks.planning.explain import ALTERNATIVES_MAX, STANDING_SHARE_MIN, advice_to_stand
from tasks.planning.iteration_plan import plan_iteration
from tasks.planning.request import BudgetExceeded
from tests.planning_requests import CURVE, a_pool, a_request, alike_lengths, requests, some_lengths, waits

RESERVED = TrainerCapacity(engines=2, usd_per_h=16.0, responses_max=64, step_time=CURVE)


def decisions(request):
    return {decision.name: decision for decision in plan_iteration(request).decisions}


def test_a_plain_iteration_says_that_nothing_is_known():
    found = decisions(a_request(a_pool(step_time=NOMINAL), lengths=alike_lengths(16)))
    assert set(found) == {"lengths", "width", "dispatch"}
    assert found["lengths"].reason == "nothing tells the groups apart"
    assert found["width"].chosen == "rollout 4"
    assert found["dispatch"].chosen == "in turn"
    assert all(not decision.predicted and not decision.alternatives for decision in found.values())


def test_measured_crews_are_predicted_under_the_reports_names():
    found = decisions(a_request(a_pool(), settings={"width": "cost"}))
    assert set(found["width"].predicted) == {
        "timing_s/rollout",
        "timing_s/iteration",
        "timing_s/rollout_machines",
        "cost/usd_rollout",
    }
    assert found["dispatch"].predicted == {"timing_s/rollout": found["width"].predicted["timing_s/rollout"]}
    with_trainer = decisions(a_request(a_pool(), reserved=RESERVED, settings={"width": "cost"}))
    assert "cost/usd_iter" in with_trainer["width"].predicted


def test_the_chosen_width_is_among_its_alternatives_with_the_least_score():
    width = decisions(a_request(a_pool(count_max=40), groups=64, settings={"width": "cost"}))["width"]
    scores = {name: figures["score"] for name, figures in width.alternatives.items()}
    assert scores[width.chosen] == min(scores.values())
    assert 2 <= len(scores) <= ALTERNATIVES_MAX
    assert width.alternatives[width.chosen]["cost/usd_rollout"] == width.predicted["cost/usd_rollout"]


def test_balance_says_both_times_and_what_a_member_saves():
    request = a_request(
        a_pool(count_max=8),
        lengths=some_lengths(64, sigma=0.05),
        settings={"width": "balance"},
        width=(("rollout", 4),),
        waits=waits(rollout_s=300.0),
    )
    found = decisions(request)["balance"]
    assert (found.chosen, found.inputs["generation_s"], found.inputs["delta_s"]) == ("+1", 300.0, 200.0)
    assert 0 < found.inputs["saved_by_one_more_s"] < 200.0
    assert "longer than training" in found.reason


PAST = {"reserved": RESERVED, "settings": {"seeding": "auto"}, "train_s": 100.0}


def test_seeding_says_who_waited_and_what_the_closed_form_says():
    before = SeedingRecord(seeding_s=60.0, members=4)
    last = waits(wait_train_s=30.0, rollout_s=200.0)
    found = decisions(a_request(a_pool(), **PAST, groups=300, seeding=before, waits=last))["seeding"]
    assert found.chosen == "70.0 s"
    assert found.predicted == {"seeding/seconds": 70.0}
    assert found.reason == "the trainer waited for longer than the crew"
    assert found.alternatives["both sides end together"] == {"seeding/seconds": (920.0 - 4 * 70.0) / 6}
    first = decisions(a_request(a_pool(), **PAST))["seeding"]
    assert (first.chosen, first.reason) == ("150.0 s", "the first time, so as configured")
    plenty = decisions(a_request(a_pool(), **PAST, seeding=before, waits=waits(rollout_s=50.0)))["seeding"]
    assert (plenty.chosen, plenty.reason[:17]) == ("none", "the members alone")
    alone = decisions(a_request(**PAST))["seeding"]
    assert alone.chosen == "until nothing is left"
    short = PAST | {"train_s": 10.0}
    moved = decisions(a_request(a_pool(count_max=3), **short, groups=300, seeding=before, waits=last))["seeding"]
    assert moved.reason == "the time that the last iteration's work needs"
    known = SeedingRecord(seeding_s=60.0, members=4, memory={"3": 80.0})
    back = decisions(a_request(a_pool(count_max=3), **PAST, groups=300, seeding=known, waits=last))["seeding"]
    assert (back.chosen, back.reason) == ("80.0 s", "the time that suited 3 members before")


def test_seeding_is_left_out_where_the_iteration_is_expected_to_end_sooner_without():
    """16 groups are 10 s of work, and whatever the trainer's engines do, training can only begin after it."""
    before = SeedingRecord(seeding_s=60.0, members=4)
    last = waits(wait_train_s=30.0, rollout_s=200.0)
    found = decisions(a_request(a_pool(), **PAST, seeding=before, waits=last))["seeding"]
    assert found.chosen == "none"
    assert found.reason == "the iteration is expected to end sooner than with 70.0 s"
    seconds = {name: figures.get("timing_s/iteration") for name, figures in found.alternatives.items()}
    assert set(seconds) == {"both sides end together", "70.0 s", "none", "until nothing is left"}
    assert seconds["none"] < min(seconds["70.0 s"], seconds["until nothing is left"])


def test_seeding_goes_on_where_handing_over_would_cost_more():
    before = SeedingRecord(seeding_s=60.0, members=1)
    last = waits(wait_train_s=30.0, rollout_s=200.0, members=1.0, members_at_end=1)
    request = a_request(a_pool(count_max=1), **PAST | {"train_s": 1.0}, groups=400, seeding=before, waits=last)
    assert decisions(request)["seeding"].chosen == "until nothing is left"


def test_seeding_says_what_it_went_by():
    last = waits(wait_train_s=30.0, rollout_s=200.0)
    initial = SeedingRecord(seeding_s=150.0, members=4)
    quick = PAST | {"train_s": 20.0}
    second = decisions(a_request(a_pool(), **quick, groups=300, seeding=initial, waits=last))["seeding"]
    assert second.reason == "the time that the last iteration's work needs"
    colocated = SeedingRecord(seeding_s=None, members=0)
    after = decisions(a_request(a_pool(), **quick, groups=300, seeding=colocated, waits=last))["seeding"]
    assert (after.chosen, after.reason[:13]) == ("150.0 s", "as configured")
    untold = decisions(a_request(a_pool(), **PAST, seeding=replace(initial, seeding_s=9.0)))["seeding"]
    assert (untold.chosen, untold.reason) == ("9.0 s", "as before, because the waits are unknown")
    slow = {**PAST, "reserved": replace(RESERVED, start_s=80.0)}
    hardly = decisions(a_request(a_pool(), **slow, seeding=replace(initial, seeding_s=9.0), waits=last))["seeding"]
    assert (hardly.chosen, hardly.reason) == ("none", "the engines would hardly have begun by then")
    nobody = decisions(a_request(a_pool(available=0), **PAST))["seeding"]
    assert nobody.reason == "no member of the crew is expected to be there"


def test_members_of_other_speeds_are_no_reason_to_speak_of_lengths():
    request = a_request(a_pool(), a_pool("spot", step_time=CURVE.scaled(2.0)), lengths=alike_lengths(16))
    found = decisions(request)["dispatch"]
    assert found.chosen.startswith("by speed")
    assert found.reason == "by what each member can do, so that the last response ends early"


@pytest.mark.slow
@given(requests())
def test_every_decision_can_be_stored_and_read_by_people(request):
    try:
        plan = plan_iteration(request)
    except (BudgetExceeded, ValueError):
        return
    for decision in plan.decisions:
        assert decision.chosen
        assert decision.reason
        figures = [decision.inputs, decision.predicted, *decision.alternatives.values()]
        assert all(math.isfinite(value) for figure in figures for value in figure.values() if "score" not in figure)
        stored = canonical.encode(decision)
        assert canonical.decode(type(decision), "x", stored) == decision
        assert len(stored) < 10_000
        json.loads(stored)


def a_crews_request(*, train_s, **changes):
    pools = (a_pool(cold_start_s=90.0, usd_per_h=2.0), a_pool("far", cold_start_s=30.0, usd_per_h=1.0))
    return a_request(*pools, reserved=RESERVED, waits=waits(), train_s=train_s, training="at_end", **changes)


def test_the_plan_shows_both_figures_and_which_crew_is_cheaper():
    for train_s, cheaper in ((10.0, "standing"), (3000.0, "iteration")):
        for crew in ("iteration", "standing"):
            request = a_crews_request(train_s=train_s, control_s=5.0, crew=crew)
            decision = decisions(request)["crew"]
            assert decision.chosen == crew
            assert f"'{cheaper}'" in decision.reason
            assert decision.reason.endswith("too") == (crew == cheaper)
            assert decision.inputs["wait_s"] == pytest.approx(train_s + 5.0)
            # Four members of each pool.
            assert decision.inputs["usd_wait"] == pytest.approx(4 * 3.0 * (train_s + 5.0) / 3600)
            assert decision.inputs["usd_start"] == pytest.approx(4 * (90.0 * 2.0 + 30.0) / 3600)
            assert decision.inputs["rollout/start_s"] == 90.0


def test_members_that_go_on_with_the_next_iteration_wait_only_for_what_training_takes_longer():
    request = a_crews_request(train_s=10.0, overlaps=True)
    decision = decisions(request)["crew"]
    assert decision.inputs["wait_s"] == 0.0


def test_nothing_is_said_of_the_kind_of_crew_before_starts_and_steps_are_measured_or_without_members():
    request = a_crews_request(train_s=10.0)
    assert "crew" in decisions(request)
    without = replace(request, pools=(a_pool(count_min=0, count_max=0),), settings=PlanningConfig(seeding="auto"))
    unmeasured = replace(request, pools=tuple(replace(pool, step_time=NOMINAL) for pool in request.pools))
    for silent in (without, replace(request, pools=(a_pool(), a_pool("far"))), unmeasured):
        assert "crew" not in decisions(silent)


@pytest.mark.parametrize("placement", ["own", "pod"])
def test_a_standing_trainer_is_recommended_from_three_per_cent_of_an_iteration_on(placement):
    assert STANDING_SHARE_MIN == 0.03
    assert advice_to_stand(placement, 3.0, 100.0) == ""
    said = advice_to_stand(placement, 21.0, 47.0)
    assert said.startswith("restoring and writing the trainer's state takes 21 s of an iteration of 47 s (45%); ")
    assert "trainer.placement 'standing'" in said
    assert "\n" not in said


@pytest.mark.parametrize("placement", ["standing", "shared"])
def test_no_standing_trainer_is_recommended_to_a_host(placement):
    assert advice_to_stand(placement, 21.0, 47.0) == ""


def test_no_standing_trainer_is_recommended_for_unknown_lengths():
    assert advice_to_stand("own", 21.0, 0.0) == ""
