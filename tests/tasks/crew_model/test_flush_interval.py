import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.prices import GET_USD, PUT_USD
from tasks.crew_model.flush_interval import best_flush_interval_s, expected_usd_per_h, flush_usd

REQUESTS_USD = PUT_USD + GET_USD


@pytest.mark.parametrize(
    ("losses_per_h", "usd_per_h", "interval_s"),
    [(0.005, 1, 167), (0.02, 3, 48), (0.1, 8, 13), (0.1, 24, 7.6), (0.5, 24, 3.4), (2, 80, 0.9)],
)
def test_the_optimum_of_one_write_and_one_read_per_flush(losses_per_h, usd_per_h, interval_s):
    assert best_flush_interval_s(REQUESTS_USD, losses_per_h, usd_per_h) == pytest.approx(interval_s, rel=0.05)


def test_a_case_worked_out_by_hand():
    # 720 flushes of 1 cent; one loss in two hours takes 2.5 s of a machine of 3.6 $/h, 0.1 cents a second.
    assert expected_usd_per_h(5.0, 0.01, 0.5, 3.6) == pytest.approx(7.2 + 0.5 * 2.5 * 0.001)
    assert flush_usd(5e-6, 4e-7, 0.005, 24.0) == pytest.approx(6.2e-6 + 0.005 * 24 / 3600)


@given(
    st.floats(1e-7, 1e-3),
    st.floats(1e-3, 10),
    st.floats(0.1, 100),
    st.floats(0.1, 10).filter(lambda x: abs(x - 1) > 0.01),
)
def test_no_other_interval_is_cheaper(usd_per_flush, losses_per_h, usd_per_h, factor):
    best_s = best_flush_interval_s(usd_per_flush, losses_per_h, usd_per_h)
    least = expected_usd_per_h(best_s, usd_per_flush, losses_per_h, usd_per_h)
    assert expected_usd_per_h(best_s * factor, usd_per_flush, losses_per_h, usd_per_h) > least


@pytest.mark.parametrize(("losses_per_h", "usd_per_h"), [(0.0, 3.0), (0.1, 0.0)])
def test_what_costs_nothing_to_lose_need_not_be_written(losses_per_h, usd_per_h):
    assert best_flush_interval_s(REQUESTS_USD, losses_per_h, usd_per_h) == math.inf
