"""Step times by batch size, and the batch from which on more does not pay."""

import pytest

from tasks.planning.decode_rate import STEPS_MIN, DecodeRate


def measured(step_s, batches) -> DecodeRate:
    rate = DecodeRate()
    for batch in batches:
        for _ in range(STEPS_MIN):
            rate.record(batch, step_s(batch))
    return rate


def test_nothing_is_known_before_batches_of_different_sizes_were_seen():
    assert DecodeRate().plateau() == 0
    assert measured(lambda _: 0.01, [8]).plateau() == 0
    assert measured(lambda _: 0.01, [8, 5]).plateau() == 0
    once = DecodeRate()
    once.record(8, 0.01)
    once.record(1, 0.01)
    assert once.plateau() == 0
    assert once.per_response(4) == ()


def test_below_the_plateau_a_step_costs_the_same_and_beyond_it_grows_with_the_batch():
    rate = measured(lambda batch: 0.01 * max(1.0, batch / 16), range(64, 0, -1))
    assert rate.plateau() == 16  # 15.2 would do within 5 %


def test_a_rate_that_still_rises_has_its_plateau_at_the_largest_batch():
    assert measured(lambda _: 0.01, [4, 2, 1]).plateau() == 4


def test_one_response_is_as_fast_as_the_nearest_measured_batch_allows():
    rate = measured(lambda batch: 0.01 * batch, [2, 8])
    per_response = rate.per_response(16)
    assert per_response[1] == per_response[2] == pytest.approx(50)
    assert per_response[8] == pytest.approx(12.5)
    assert per_response[16] == pytest.approx(6.25)


def test_a_single_slow_step_counts_for_little():
    rate = measured(lambda _: 0.01, [4, 1])
    rate.record(4, 1.0)
    assert rate.per_response(4)[4] > 1 / 0.13
