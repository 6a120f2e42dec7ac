import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.resume_value import EngineCosts, break_even_losses_per_h, expected_duration_s, resume_costs

COSTS = EngineCosts(
    responses_in_flight=64,
    decode_tokens_per_s=40.0,
    prefill_tokens_per_s=10_000.0,
    journal_share=0.003,
    flush_interval_s=5.0,
    takeover_s=1.0,
)


def simulated_s(work_s: float, interval_s: float, write_s: float, restart_s: float, rate: float, seed: int) -> float:
    """One history, loss by loss: an interval counts when no loss strikes it; a restart may be struck, too."""
    rng = random.Random(seed)
    now_s, next_loss_s, due_s = 0.0, rng.expovariate(rate), 0.0
    for _ in range(round(work_s / interval_s)):
        due_s = now_s + interval_s + write_s
        while next_loss_s < due_s:
            now_s = next_loss_s
            next_loss_s = now_s + rng.expovariate(rate)
            due_s = now_s + restart_s + interval_s + write_s
        now_s = due_s
    return now_s


@pytest.mark.parametrize(
    ("interval_s", "write_s", "restart_s", "per_h"),
    [(100.0, 0.0, 0.0, 20.0), (10.0, 1.0, 7.0, 60.0), (5.0, 0.1, 20.0, 30.0), (50.0, 0.0, 30.0, 40.0)],
)
def test_closed_form_is_the_mean_of_simulated_histories(interval_s, write_s, restart_s, per_h):
    rate, count = per_h / 3600.0, 6000
    histories = [simulated_s(100.0, interval_s, write_s, restart_s, rate, seed) for seed in range(count)]
    mean_s = sum(histories) / count
    error_s = math.sqrt(sum((each - mean_s) ** 2 for each in histories) / count**2)
    expected_s = expected_duration_s(
        100.0, interval_s=interval_s, write_s=write_s, restart_s=restart_s, losses_per_h=per_h
    )
    assert abs(mean_s - expected_s) < 4 * error_s


def test_without_losses_only_the_journal_costs():
    found = resume_costs(COSTS, prompt_tokens=100, response_tokens=4000, losses_per_h=0.0, waves=4)
    prefill_s = 100 * 64 / 10_000.0
    assert found.work_s == found.whole_response_s == found.whole_batch_s == pytest.approx(100.0 + prefill_s)
    assert found.since_flush_s == pytest.approx(100.3 + prefill_s)
    assert found.saving < 0


def test_numbers_worked_out_by_hand():
    found = resume_costs(COSTS, prompt_tokens=0, response_tokens=4000, losses_per_h=36.0, waves=2)
    assert found.whole_response_s == pytest.approx(100 * (math.e - 1))
    assert found.whole_batch_s == pytest.approx(50 * (math.e**2 - 1))
    restart_s = 1.0 + 2000 * 64 / 10_000.0
    assert found.since_flush_s == pytest.approx(20 * 100 * math.exp(restart_s / 100) * math.expm1(5.015 / 100))


@given(tokens=st.integers(64, 32_768), per_h=st.floats(0.001, 10.0), more=st.floats(1.01, 4.0))
def test_more_losses_cost_every_design_more(tokens: int, per_h: float, more: float):
    few = resume_costs(COSTS, prompt_tokens=50, response_tokens=tokens, losses_per_h=per_h, waves=3)
    many = resume_costs(COSTS, prompt_tokens=50, response_tokens=tokens, losses_per_h=per_h * more, waves=3)
    assert few.work_s < few.whole_response_s < few.whole_batch_s
    assert few.whole_response_s < many.whole_response_s
    assert few.since_flush_s < many.since_flush_s


def test_break_even_separates_cost_from_gain():
    rate = break_even_losses_per_h(COSTS, prompt_tokens=100, response_tokens=4000)
    assert rate is not None
    for factor, worth in ((0.9, False), (1.1, True)):
        found = resume_costs(COSTS, prompt_tokens=100, response_tokens=4000, losses_per_h=rate * factor)
        assert (found.saving > 0) is worth


def test_longer_responses_break_even_earlier_and_short_ones_never():
    rates = [break_even_losses_per_h(COSTS, prompt_tokens=100, response_tokens=n) for n in (2048, 8192, 32_768)]
    assert rates == sorted(rates, reverse=True)
    assert break_even_losses_per_h(COSTS, prompt_tokens=100, response_tokens=256) is None


def test_hopeless_work_is_infinite_not_an_overflow():
    assert expected_duration_s(1e6, interval_s=1e6, write_s=0, restart_s=0, losses_per_h=10.0) == math.inf
