import random
from itertools import pairwise

import pytest

from tasks.sampling.engines.draft_counts import DraftCounts, StepTimes, best_drafts, expected_tokens
from tasks.sampling.engines.drafter import WIDTHS

CHOICES = [width - 1 for width in WIDTHS]


def step_of_7b(tokens):
    """Seconds of a step of a model of 7B in bfloat16 on an H100: its weights are read, then arithmetic counts."""
    points = ((1, 7.6e-3), (64, 8.4e-3), (172, 10e-3), (344, 18e-3), (688, 34e-3), (1 << 20, 51.8))
    low, high = next((a, b) for a, b in pairwise(points) if tokens <= b[0])
    return low[1] + (high[1] - low[1]) * (tokens - low[0]) / (high[0] - low[0])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("drafts", [0, 1, 4, 8])
def test_expected_tokens_are_those_of_all_outcomes(share, drafts):
    """One token, and one more for each draft behind right ones."""
    wanted = sum(share**right * (1 - share) * (right + 1) for right in range(drafts)) + share**drafts * (drafts + 1)
    assert expected_tokens(share, drafts) == pytest.approx(wanted)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("responses", [1, 4, 16, 64, 128, 256])
def test_the_best_number_is_that_of_all_rates(share, responses):
    rates = {k: responses * expected_tokens(share, k) / step_of_7b(responses * (k + 1)) for k in CHOICES}
    found = best_drafts(responses, lambda k: responses * expected_tokens(share, k), step_of_7b, CHOICES[1:])
    best = max(rates.values())
    assert rates[found] == best or (found == 0 and best < 1.03 * rates[0])
    if share == 0.0:
        assert found == 0


def test_drafts_are_chosen_as_published_for_a_model_of_7b():
    table = {(0.3, 4): 4, (0.3, 64): 1, (0.3, 256): 0, (0.7, 4): 8, (0.7, 32): 4, (0.7, 128): 1, (0.7, 256): 0}
    for (share, responses), wanted in table.items():
        tokens = [responses * expected_tokens(share, k) for k in range(9)]
        assert best_drafts(responses, tokens.__getitem__, step_of_7b, CHOICES) == wanted, (share, responses)


def test_step_times_are_middles_of_the_last_times_and_between_sizes_in_proportion():
    times = StepTimes()
    assert not times.knows(1)
    for seconds in (9.0, 1.0, 1.2, 50.0, 1.1, 1.0):
        times.measured(16, 1, seconds)
    assert times(16) == 1.1, "the first warms the shape up, and one other is out of the way"
    for _ in range(2):
        times.measured(16, 4, 4.1)
    assert times.knows(64)
    assert not times.knows(70)
    assert 1.1 < times(32) < times(50) < 4.1 == times(64)
    assert 4.1 < times(128) < 2 * 4.1


def test_a_step_below_the_measured_sizes_counts_as_short_as_it_can_be():
    times = StepTimes()
    for _ in range(2):
        times.measured(64, 1, 8.0)
    assert times(16) == 2.0, "a line through nothing"
    for _ in range(2):
        times.measured(64, 4, 20.0)
    assert times(32) == 6.0, "on the line of both sizes"
    assert times(1) == pytest.approx(8.0 - 63 / 16)
    for _ in range(9):
        times.measured(64, 4, 6.0)
    assert times(1) == 6.0, "no smaller step takes longer"
    steep = StepTimes()
    for _ in range(2):
        steep.measured(64, 1, 1.0)
        steep.measured(128, 1, 9.0)
    assert steep(1) == 1 / 64 > 0, "the line is below zero"


def test_an_old_time_counts_no_more():
    times = StepTimes()
    for _ in range(3):
        times.measured(4, 2, 7.0)
    for _ in range(2100):
        times.measured(4, 1, 1.0)
    assert not times.knows(8)
    assert times(8) < 2.0


def simulated(step_s, share, responses, steps=3000, seed=0, counts=None):
    """Seconds per token with the chosen numbers over those without drafts, where tau and share are as told."""
    counts, rnd = counts or DraftCounts(), random.Random(seed)
    seconds, tokens, asks = 0.0, 0, False
    for step in range(steps):
        if step % 16 == 0:
            asks = counts.worth_asking(responses)
        asked = asks or step % 16 == 0
        lengths = dict.fromkeys(range(responses), 8 if asked else 0)
        drafts = counts.best(lengths)
        taken = step_s(responses * (drafts + 1))
        seconds += taken
        given = 0
        for response in range(responses):
            right = 0
            while right < drafts and rnd.random() < share:
                right += 1
            given += right + 1
            if drafts:
                counts.drafted(response, right, min(right + 1, drafts))
            elif asked:
                counts.drafted(response, int(rnd.random() < share), 1)
        counts.took(responses, drafts + 1, taken * rnd.uniform(0.97, 1.03), given)
        tokens += given
    return seconds / tokens / (step_s(responses) / responses)


@pytest.mark.parametrize(("responses", "share"), [(1, 0.5), (4, 0.7), (16, 0.5), (32, 0.3)])
def test_it_finds_nearly_the_best_from_its_own_measurements(responses, share):
    best = min(step_of_7b(responses * (k + 1)) / expected_tokens(share, k) for k in CHOICES) / step_of_7b(responses)
    assert best < 0.9
    assert simulated(step_of_7b, share, responses) < 1.08 * best


@pytest.mark.parametrize(("responses", "share"), [(4, 0.0), (64, 0.0), (256, 0.6)])
def test_where_drafts_do_not_pay_they_cost_nothing(responses, share):
    assert simulated(step_of_7b, share, responses, steps=2000) < 1.01


@pytest.mark.parametrize(
    ("step_s", "least", "most"),
    [(lambda fed: 1e-3 * fed, 0.99, 1.01), (lambda fed: 1e-3 + 1e-4 * fed, 0.6, 0.8)],
    ids=["no draft pays", "drafts pay"],
)
def test_in_the_tail_after_a_full_batch_drafts_are_taken_where_they_pay(step_s, least, most):
    """Then only larger steps have times, and a step without drafts is believed to be no longer than it is."""
    counts = DraftCounts()
    simulated(step_s, 0.5, 64, steps=200, counts=counts)
    assert least < simulated(step_s, 0.5, 2, steps=500, counts=counts) < most


def test_what_a_drafter_computes_counts_in_its_number():
    counts = DraftCounts(computes=True)
    assert not counts.knows_drafts
    for width in (1, 2, 3, 5, 9):
        for _ in range(3):
            counts.took(4, width, 1.0, 4)
    for _ in range(50):
        counts.drafted(1, 4, 5)
    assert counts.worth(4) == 0, "drafts of unknown cost"
    for pass_s, wanted in ((0.001, 8), (0.1, 4), (0.3, 2), (0.9, 0)):
        for _ in range(9):
            counts.computed(4, pass_s)
        assert counts.knows_drafts
        best = max((expected_tokens(0.79, k) / (1 + k * pass_s), -k) for k in CHOICES)
        assert counts.worth(4) == wanted == -best[1], pass_s
    assert counts.took(4, 3, 1.0, 10) == pytest.approx(2.5 - 1.0 - 2 * 0.9)


def test_a_response_is_judged_by_its_own_drafts_and_first_by_all():
    counts = DraftCounts()
    assert counts.share(1) == 0
    for _ in range(50):
        counts.drafted(1, 1, 2)
        counts.drafted(2, 3, 3)
    assert counts.share(1) < 0.6 < counts.share(3) < 0.9 < counts.share(2)
    counts.leave([2])
    assert counts.share(2) == counts.share(3)


def test_what_drafts_save_is_told_from_measured_times():
    counts = DraftCounts()
    for _ in range(4):
        assert counts.took(4, 1, 1.0, 4) == 0.0
        saved_s = counts.took(4, 3, 1.5, 10)
    assert saved_s == pytest.approx(2.5 * 1.0 - 1.5)
    assert counts.took(4, 3, 90.0, 4) == pytest.approx(1.0 - 1.5), "one long step says nothing"
