import math
from decimal import Decimal
from itertools import count
from typing import Any

import numpy as np
import pytest

from tasks.grading.outcome import batch_outcomes, value_outcome
from tasks.grading.reward import RewardOutcome


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (None, None),
        ({"score": 0.5, "acc": True}, 0.5),
        ({"score": None}, None),
    ],
)
def test_numbers_none_and_scores_are_outcomes(value: Any, expected: float | None):
    outcome = value_outcome(value)
    assert outcome == RewardOutcome(expected)
    assert type(outcome.value) is type(expected)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (math.nan, "returned nan; allowed: a finite number"),
        (-math.inf, "returned -inf; allowed: a finite number"),
        (10**400, "returned inf; allowed: a finite number"),
        ("1.0", "returned '1.0' of type str; allowed: float or None"),
        (Decimal(1), "of type Decimal"),
        (1j, "of type complex"),
        ([1.0], "of type list"),
        (np.array([1.0, 2.0]), "of type ndarray"),
        ({"acc": 1.0}, "allowed: a dict with 'score'"),
        ({"score": "high"}, "returned 'high' of type str"),
        (Unprintable(), "returned a value of type Unprintable"),
        ("x" * 10_000, "... of type str"),
    ],
)
def test_anything_else_is_an_error(value: Any, error: str):
    outcome = value_outcome(value)
    assert outcome.value is None
    assert outcome.error is not None
    assert error in outcome.error
    assert len(outcome.error) < 400


def test_a_batch_has_one_value_per_completion():
    values = [1.0, None, "x"]
    assert [outcome.value for outcome in batch_outcomes(values, 3)] == [1.0, None, None]
    assert [outcome.error is None for outcome in batch_outcomes(values, 3)] == [True, True, False]
    assert [outcome.value for outcome in batch_outcomes(np.array([0.5, 1.0]), 2)] == [0.5, 1.0]
    assert [outcome.value for outcome in batch_outcomes((x for x in (1, 2)), 2)] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0] * 3, "returned more than 2 values for 2 completions"),
        (count(), "returned more than 2 values for 2 completions"),
        (1.0, "returned 1.0 of type float; allowed: a list of float or None"),
        (None, "returned None of type NoneType; allowed: a list"),
        ("ab", "returned 'ab' of type str; allowed: a list"),
        ({"a": 1, "b": 2}, "of type dict; allowed: a list"),
        (np.array(1.0), "of type ndarray; allowed: a list"),
    ],
)
def test_a_wrong_batch_is_an_error_of_every_completion(returned: Any, error: str):
    outcomes = batch_outcomes(returned, 2)
    assert len(outcomes) == 2
    assert all(outcome.value is None and error in str(outcome.error) for outcome in outcomes)


def test_an_outcome_with_an_error_stays_what_it_is_and_another_is_no_value():
    outcomes = batch_outcomes([RewardOutcome(None, "is too long"), 1, RewardOutcome(2.0)], 3)
    assert outcomes[:2] == [RewardOutcome(None, "is too long"), RewardOutcome(1.0)]
    assert "allowed: float or None" in str(outcomes[2].error)
