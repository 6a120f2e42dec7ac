"""Outlines need only be near: they say which widths are worth dealing groups to."""

import numpy as np
import pytest

from tasks.planning.crew import planned_crew
from tasks.planning.offer import ReservedOffer
from tasks.planning.outline import Outline, outline
from tasks.planning.request import PlanningRequest
from tests.planning_requests import CURVE, a_request, alike_lengths, an_offer, some_lengths, waits


def outlined(request: PlanningRequest, counts: tuple[int, ...]) -> Outline:
    return outline(request, counts, np.sort(request.responses, axis=None)[::-1])


@pytest.mark.parametrize("counts", [(1, 0), (4, 0), (0, 3), (2, 2)])
def test_of_groups_alike_it_is_nearly_exact(counts):
    offers = an_offer(), an_offer("spot", step_time=CURVE.scaled(1.1), usd_per_h=1.0, losses_per_h=1.0)
    request = a_request(*offers, groups=64, lengths=alike_lengths(64))
    guessed, dealt = outlined(request, counts), planned_crew(request, counts)
    assert guessed.iteration_s == pytest.approx(dealt.iteration_s, rel=0.15)
    assert guessed.usd_iteration == pytest.approx(dealt.usd_iteration, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["makespan", "gpu_seconds"])
def test_of_long_tails_it_is_near_in_time_and_in_dollars(objective):
    found = []
    for seed in range(4):
        offers = an_offer(count_max=32), an_offer("spot", count_max=8, step_time=CURVE.scaled(1.5), usd_per_h=1.0)
        request = a_request(*offers, lengths=some_lengths(64, seed=seed), settings={"objective": objective})
        for counts in ((1, 0), (2, 0), (4, 0), (8, 0), (32, 0), (0, 4), (4, 4)):
            guessed, dealt = outlined(request, counts), planned_crew(request, counts)
            found.append((guessed.iteration_s / dealt.iteration_s, guessed.usd_iteration / dealt.usd_iteration))
    wrong = np.abs(np.log(found))
    assert np.median(wrong) < 0.25
    assert np.max(wrong) < 1.2


def test_the_trainers_engines_shorten_it_and_do_it_alone():
    reserved = ReservedOffer(engines=2, usd_per_h=16.0, responses_max=64, step_time=CURVE)
    offer = an_offer(count_max=2)
    alone = a_request(offer, lengths=alike_lengths(64), waits=waits(train_s=0.0))
    helped = a_request(
        offer,
        lengths=alike_lengths(64),
        reserved=reserved,
        settings={"seeding": "auto", "seeding_s_initial": 8.0},
        waits=waits(train_s=0.0),
    )
    assert outlined(helped, (2,)).iteration_s < outlined(alone, (2,)).iteration_s
    colocated = outlined(helped, (0,))
    assert colocated.iteration_s == pytest.approx(planned_crew(helped, (0,)).iteration_s, rel=0.3)
    assert colocated.usd_iteration == pytest.approx(colocated.iteration_s * 16 / 3600)
