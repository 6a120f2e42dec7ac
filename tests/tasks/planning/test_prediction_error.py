"""Corrections: outlines in hindsight, whose errors repeat, the more so the more alike the crews are."""

from dataclasses import replace

import numpy as np
import pytest

from storage.planning_records import SeedingRecord
from tasks.crew_model.step_time import NOMINAL
from tasks.planning.makespan import member_time_s
from tasks.planning.offer import ReservedOffer
from tasks.planning.prediction_error import FACTOR_MAX, TRUST, Realised, correction, errors
from tests.planning_requests import CURVE, a_request, an_offer, concluded


def seen(members: int, ratio: float, *, seeded: bool = False) -> Realised:
    return Realised(width={"rollout": members}, seeded=seeded, expected_s=100.0, lasted_s=100.0 * ratio)


def factor(*past: Realised, members: int = 4, seeded: bool = False) -> float:
    return correction(past, {"rollout": members}, seeded=seeded)


def test_without_a_past_nothing_is_corrected():
    assert factor() == 1.0


def test_the_same_crew_is_expected_to_err_as_before_and_others_less():
    same, size = factor(seen(4, 1.5)), factor(seen(3, 1.5))
    seeding, alone = factor(seen(4, 1.5, seeded=True)), factor(seen(0, 1.5))
    assert same == pytest.approx(1.5 ** TRUST["same"])
    assert same > size > seeding == alone > 1.0


def test_what_the_same_crew_did_outweighs_the_others():
    assert factor(seen(0, 3.0), seen(0, 3.0), seen(4, 1.0)) < 1.1


def test_the_newest_counts_most():
    assert factor(seen(4, 1.5), seen(4, 1.0)) > factor(seen(4, 1.0), seen(4, 1.5)) > 1.0


def test_a_factor_is_bounded_and_nonsense_ignored():
    assert factor(seen(4, 1e6)) == FACTOR_MAX
    assert factor(seen(4, 1e-6)) == 1 / FACTOR_MAX
    assert factor(seen(4, 0.0)) == 1.0


SHORT, LONG = np.full((16, 4), 200.0), np.full((16, 4), 800.0)


def test_an_iteration_is_compared_with_its_outline_in_hindsight():
    """Its lengths and its training count, and the machines that were there; not what was expected."""
    offer = an_offer(machine_start_s=300.0, there=4, available=1)
    request = a_request(offer, train_s=999.0, past=(concluded(LONG), concluded(SHORT, lasted_s=70.0)))
    long, short = errors(request)
    assert (long.lasted_s, short.lasted_s) == (100.0, 70.0)
    assert short.expected_s == pytest.approx(30.0 + member_time_s([200.0] * 64, CURVE, 64))
    assert long.expected_s == pytest.approx(30.0 + member_time_s([800.0] * 64, CURVE, 64))
    [trained] = errors(replace(request, past=(concluded(SHORT, train_s=1000.0),)))
    assert trained.expected_s > 1000.0
    [two] = errors(replace(request, past=(concluded(SHORT, width={"rollout": 2, "gone": 0}),)))
    assert two.expected_s == pytest.approx(30.0 + member_time_s([200.0] * 32, CURVE, 64))
    assert short == errors(replace(request, past=(concluded(SHORT, there={"rollout": 1}, lasted_s=70.0),)))[0]


def test_an_iteration_that_waited_for_machines_says_nothing():
    waited = concluded(SHORT, width={"rollout": 2, "gone": 1}, there={"rollout": 1, "gone": None})
    request = a_request(an_offer(), past=(waited, concluded(LONG)))
    assert [seen.width for seen in errors(request)] == [{"rollout": 1}]


@pytest.mark.parametrize("width", [{"gone": 2}, {"rollout": 1, "gone": 1}])
@pytest.mark.parametrize("seconds", [0.0, None])
def test_an_iteration_of_which_a_member_is_on_offer_no_more_says_nothing(width, seconds):
    """Without its other members it would be outlined as slower than it was, also if the trainer's machines helped."""
    gone = concluded(SHORT, width=width, seeding=SeedingRecord(seeding_s=seconds, members=1))
    reserved = ReservedOffer(engines=1, usd_per_h=1.0, responses_max=64, step_time=CURVE)
    assert errors(a_request(an_offer(), reserved=reserved, past=(gone,))) == ()


def test_where_nothing_is_measured_nothing_was_outlined():
    assert errors(a_request(an_offer(step_time=NOMINAL), past=(concluded(SHORT),))) == ()


@pytest.mark.parametrize(("seconds", "seeded"), [(0.0, False), (5.0, True), (None, True)])
def test_the_trainers_machines_count_as_generating_unless_they_do_not(seconds, seeded):
    seeding = SeedingRecord(seeding_s=seconds, members=1)
    [found] = errors(a_request(an_offer(), past=(concluded(SHORT, seeding=seeding),)))
    assert found.seeded is seeded
