"""The benchmark of drafts: its clock, its comparison, and a paced iteration, which drafts shorten and do not change."""

import pytest

from benchmarks.speculation import STEP_S, PacedClock, identical, paced_seconds, tail_requests
from benchmarks.weight_steps import make_random_policy


def test_a_paced_step_takes_the_seconds_of_the_curve():
    clock = PacedClock()
    for tokens, seconds in STEP_S:
        before_s = clock()
        clock.step(tokens)
        assert clock() - before_s == pytest.approx(seconds)
    clock.step(258)
    assert clock() - sum(seconds for _, seconds in STEP_S) == pytest.approx((10e-3 + 18e-3) / 2)


def test_responses_are_identical_in_tokens_and_log_probs():
    wanted = {1: ([4, 5], [-1.0, -2.0]), 2: ([6], [-1.0])}
    assert identical(wanted, wanted) == 2
    assert identical({**wanted, 1: ([4, 6], [-1.0, -2.0])}, wanted) == 1
    assert identical({**wanted, 1: ([4], [-1.0])}, wanted) == 1
    assert identical({**wanted, 2: ([6], [-1.1])}, wanted) == 1


@pytest.mark.slow
def test_a_paced_iteration_with_right_drafts_is_shorter_and_the_same(tmp_path):
    model = make_random_policy(tmp_path, hidden=64, layers=1)
    requests = tail_requests(12, 60, equal=False)
    plain_s, wanted = paced_seconds(model, requests, 4, None, 0.0)
    assert {response: len(tokens) for response, (tokens, _) in wanted.items()} == {
        request.response: request.sampling.max_completion_length for request in requests
    }
    drafted_s, found = paced_seconds(model, requests, 4, wanted, 0.9)
    assert identical(found, wanted) == 12
    assert drafted_s < 0.9 * plain_s
