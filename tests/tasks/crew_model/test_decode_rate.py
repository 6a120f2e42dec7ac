"""Step times by batch size, and the batch from which on more does not pay."""

from itertools import pairwise

import pytest

from tasks.crew_model.decode_rate import POINTS_MAX, STEPS_MIN, DecodeRate


def measured(step_s, batches) -> DecodeRate:
    rate = DecodeRate()
    for batch in batches:
        for _ in range(STEPS_MIN):
            rate.record(batch, step_s(batch), batch)
    return rate


def test_nothing_is_known_before_batches_of_different_sizes_were_seen():
    assert DecodeRate().plateau() == 0
    assert measured(lambda _: 0.01, [8]).plateau() == 0
    assert measured(lambda _: 0.01, [8, 5]).plateau() == 0
    once = DecodeRate()
    once.record(8, 0.01, 8)
    once.record(1, 0.01, 1)
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
    rate.record(4, 1.0, 4)
    assert rate.per_response(4)[4] > 1 / 0.13


def test_points_are_what_is_known_and_seconds_those_of_all_steps():
    rate = measured(lambda batch: batch / 8, [4, 1, 2])
    rate.record(64, 5.0, 64)  # once is not enough
    assert rate.points() == ((1, 0.125), (2, 0.25), (4, 0.5))
    assert rate.total_s == STEPS_MIN * 0.875 + 5.0
    assert DecodeRate().points() == ()


def test_many_points_are_thinned_with_both_ends_kept():
    rate = measured(lambda batch: batch / 8, range(1, 101))
    batches = [batch for batch, _ in rate.points()]
    assert len(batches) == POINTS_MAX
    assert (batches[0], batches[-1]) == (1, 100)
    assert batches == sorted(set(batches))
    assert max(b - a for a, b in pairwise(batches)) <= 8


def test_what_yields_more_or_fewer_tokens_than_responses_counts_by_its_tokens():
    rate = DecodeRate()
    for _ in range(STEPS_MIN):
        rate.record(4, 0.1, 0)
        rate.record(4, 0.1, 8)
    assert rate.points()[0][1] == pytest.approx(0.1, rel=0.2)
    assert rate.total_s == pytest.approx(2 * STEPS_MIN * 0.1)
    assert measured(lambda _: 0.1, [2]).points() == ((2, pytest.approx(0.1)),)
