"""The yardstick of the journal's benchmark, on samples small enough to count by hand."""

import numpy as np
import pytest

from benchmarks.journal import IN_FLIGHT, Sample, entropy_bytes, flushes, interval_row, requests_row, zipf
from storage.journal.shard import Finish


def test_entropy_is_that_of_the_frequencies():
    assert entropy_bytes(np.array([7, 7, 7, 7])) == 0
    assert entropy_bytes(np.array([1, 2, 3, 4])) == pytest.approx(2 / 8)
    assert entropy_bytes(np.arange(256).repeat(3)) == pytest.approx(1.0)


def test_the_floor_adds_ids_and_the_four_bytes_of_a_log_prob():
    logprobs = np.array([[-1.0, -2.0]], dtype=np.float32)  # bytes 00 00 80 bf and 00 00 00 c0
    assert Sample("s", np.array([[3, 3]], dtype=np.uint32), logprobs).floor() == pytest.approx((0.0, 2 / 8))


def test_flushes_hold_every_token_once_and_in_order():
    sample = zipf(IN_FLIGHT + 8, 500, ordered=True)
    got = {response: [] for response in range(IN_FLIGHT + 8)}
    for rows in flushes(sample, 2.0):
        assert len(rows) <= IN_FLIGHT
        for row in rows:
            assert row.start == len(got[row.response])
            got[row.response] += row.token_ids.tolist()
            assert (row.finish == Finish.LENGTH) == (len(got[row.response]) == 500)
    assert all(got[response] == sample.token_ids[response].tolist() for response in got)


def test_requests_fall_with_the_interval_and_five_seconds_is_never_below_the_best():
    costs = [requests_row(interval_s)["$/Mtok"] for interval_s in (1, 2, 5, 10)]
    assert costs == sorted(costs, reverse=True)
    assert all(
        value >= 0 for losses in (0.02, 2.0) for value in interval_row(losses).values() if isinstance(value, float)
    )
