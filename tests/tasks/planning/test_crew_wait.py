"""What a wait for the next plan costs beside a start, as a plan shows it."""

from dataclasses import replace

import pytest

from tasks.crew_model.step_time import NOMINAL
from tasks.planning.crew_wait import crew_wait
from tasks.planning.iteration_plan import plan_iteration
from tasks.planning.offer import ReservedOffer
from tasks.planning.width import choose_width
from tests.planning_requests import CURVE, a_request, an_offer, waits

RESERVED = ReservedOffer(engines=1, usd_per_h=16.0, responses_max=64, step_time=CURVE)


def a_crews_request(*, train_s, **changes):
    offers = (an_offer(cold_start_s=90.0, usd_per_h=2.0), an_offer("far", cold_start_s=30.0, usd_per_h=1.0))
    return a_request(*offers, reserved=RESERVED, waits=waits(), train_s=train_s, training="at_end", **changes)


def test_the_plan_shows_both_figures_and_which_crew_is_cheaper():
    for train_s, cheaper in ((10.0, "standing"), (3000.0, "iteration")):
        for crew in ("iteration", "standing"):
            request = a_crews_request(train_s=train_s, control_s=5.0, crew=crew)
            [decision] = [each for each in plan_iteration(request).decisions if each.name == "crew"]
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
    decision = crew_wait(request, choose_width(request).outline)
    assert decision.inputs["wait_s"] == 0.0


def test_nothing_is_said_before_starts_and_steps_are_measured_or_without_members():
    request = a_crews_request(train_s=10.0)
    outline = choose_width(request).outline
    assert crew_wait(request, replace(outline, counts=(0, 0))) is None
    assert crew_wait(replace(request, offers=(an_offer(), an_offer("far"))), outline) is None
    unmeasured = tuple(replace(offer, step_time=NOMINAL) for offer in request.offers)
    assert crew_wait(replace(request, offers=unmeasured), outline) is None
