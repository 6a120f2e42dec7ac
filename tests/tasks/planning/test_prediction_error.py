"""Corrections: errors repeat, the more so the more alike the crews are; none without a past."""

import pytest

from storage.planning_records import DecisionRecord, SeedingRecord
from tasks.planning.prediction_error import CORRECTION, FACTOR_MAX, ITERATION, TRUST, Realised, correction, realised


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


def decided(**inputs: float) -> tuple[DecisionRecord, ...]:
    width = DecisionRecord(name="width", chosen="x", reason="y", inputs=inputs, predicted={ITERATION: 150.0})
    return DecisionRecord(name="lengths", chosen="none", reason="y"), width


def test_an_expectation_counts_without_its_own_correction():
    found = realised(decided(train_s=5.0, **{CORRECTION: 1.5}), {"rollout": 2}, None, 120.0)
    assert found == Realised(width={"rollout": 2}, seeded=False, expected_s=100.0, lasted_s=120.0)


def test_nothing_is_learned_where_training_was_not_known_or_nothing_expected():
    assert realised(decided(), {}, None, 120.0) is None
    assert realised((), {}, None, 120.0) is None


@pytest.mark.parametrize(("seconds", "seeded"), [(0.0, False), (5.0, True), (None, True)])
def test_the_trainers_machines_count_as_generating_unless_they_do_not(seconds, seeded):
    found = realised(decided(train_s=5.0), {}, SeedingRecord(seeding_s=seconds, members=1), 1.0)
    assert found is not None
    assert found.seeded is seeded
