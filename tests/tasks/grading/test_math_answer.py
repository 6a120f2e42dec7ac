import time
from typing import Any

import pytest

from tasks.grading.math_answer import check_truths, grade_mathematics
from tasks.grading.reward import GradingCase, GradingError


def grade(completion: str, **columns: Any) -> float:
    return grade_mathematics(GradingCase(0, "?", completion, (), columns))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("completion", "columns"),
    [
        (r"so it is \boxed{72}", {"answer": "48+24 = <<48+24=72>>72 clips.\n#### 72"}),
        ("48/2=24 and 48+24=72.\n#### 72", {"answer": "#### 72"}),
        ("With $x=3$ the answer is 5, or rather\n#### 72", {"answer": "#### 72"}),
        (r"At first I found \boxed{5}. That was wrong, so again: \boxed{72}", {"ground_truth": 72}),
        (r"first \boxed{5}, no: \boxed{72}", {"ground_truth": 72}),
        (r"\boxed{2} and \boxed{1}", {"solution": r"\boxed{1}, \boxed{2}"}),
        ("The final answer is $0.5$.", {"ground_truth": r"\frac{1}{2}"}),
        (r"\boxed{1,234}", {"ground_truth": "#### 1,234"}),
        (r"\boxed{(x+1)^2}", {"solution": r"We find \boxed{x^2+2x+1}."}),
        (r"\boxed{18}", {"ground_truth": "$18"}),
        (r"\boxed{72}", {"ground_truth": None, "answer": "72"}),
        (r"\boxed{72}", {"ground_truth": "72", "answer": "73"}),
    ],
)
def test_equal_answers_are_right(completion: str, columns: dict[str, Any]):
    assert grade(completion, **columns) == 1.0


# One row each: a completion, the ground truth, and whether it is right.
NOTATION = [
    (r"\boxed{\$18.90}", r"\$18.90", True),
    (r"\boxed{18.90}", r"\$18.90", True),
    ("#### $18.90", r"\$18.90", True),
    (r"\boxed{18.91}", r"\$18.90", False),
    ("#### 7\nThis took 3 steps.", "7", True),
    ("#### 3\nChecked in 7 steps.", "7", False),
    ("#### 7 This took 3 steps.", "7", True),
    ("#### 1,234 dollars", "1234", True),
    ("#### 3 and 7", "7", False),
    ("#### 1,22", "22", False),
    ("#### 1 22", "22", False),
    ("#### 1 234", "1234", True),
    (r"\boxed{Evelyn}", "Evelyn", True),
    (r"\boxed{\text{Evelyn}}", "Evelyn", True),
    (r"\boxed{Eevlyn}", "Evelyn", False),
    (r"\boxed{Eevlyn}", r"\text{Evelyn}", False),
    (r"\boxed{n y l e v E}", "Evelyn", False),
    (r"\boxed{BA}", "AB", False),
    (r"\boxed{AB}", "AB", True),
    (r"\boxed{2yx}", "2xy", True),
    (r"<think>maybe \boxed{7}", "7", False),
    (r"<think>maybe \boxed{7}</think>I do not know", "7", False),
    (r"<think>maybe \boxed{8}</think>\boxed{7}", "7", True),
    (r"\boxed {7}", "7", True),
    (r"\fbox{7}", "7", True),
    (r"\boxed{1\,000}", "1000", True),
    (r"\boxed{1{,}000}", "1,000", True),
    (r"\boxed{1,22}", "1.22", False),
    ("The answer is 1,22.", "1.22", False),
    (r"\boxed{1.22}", "1,22", False),
    (r"\boxed{(1,22)}", "(1,22)", True),
    (r"\boxed{0.00001}", 1e-05, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("completion", "truth", "is_right"), NOTATION)
def test_notation_decides_neither_for_nor_against(completion: str, truth: Any, is_right: bool):
    assert grade(completion, ground_truth=truth) == float(is_right)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["9^{9^{9^9}}", "9^9^9^9", "(10^{10})!", "9" * 5000, "{" * 5000])
def test_numbers_too_large_to_compute_take_no_time(answer: str):
    began_s = time.thread_time()
    assert grade(rf"\boxed{{{answer}}}", ground_truth="7") == 0.0
    assert grade(f"The answer is {answer}", ground_truth="7") == 0.0
    assert time.thread_time() - began_s < 5


def test_a_number_too_large_to_compute_equals_itself():
    assert grade(r"\boxed{2^{10000000}}", ground_truth=" 2^{10000000}") == 1.0
    assert grade(r"\boxed{2^{10000001}}", ground_truth="2^{10000000}") == 0.0


def test_truths_that_cannot_be_graded_are_named():
    truths = ["7", "", r"\$18.90", "####", r"\text{Evelyn}", None, "a $", *[""] * 5]
    cases = [GradingCase(number, "", "", (), {"answer": truth}) for number, truth in enumerate(truths)]
    with pytest.raises(
        GradingError, match=r"^reward 'math' cannot grade row 1: the ground truth '' is no math"
    ) as error:
        check_truths(cases)
    assert [f"row {number}:" in str(error.value) for number in range(12)] == [
        number in {1, 3, 5, 7, 8} for number in range(12)
    ]
    assert str(error.value).endswith("; and 3 more rows")
    check_truths(cases[:1])


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ({"target": 98, "numbers": [44, 19]}, "is an object; allowed: text, a number, or a list of one"),
        ('{"target": 98}', "is a list or object as text; allowed: its only value"),
        ('["4"]', "is a list or object as text; allowed: its only value"),
        ([], "is a list without a value"),
        ([1, 2], "is a list of different values; allowed: equal ones"),
        (float("inf"), "is no number"),
        ("He bought 3 and ate 1. " * 100, "has more than 2,000 characters and states no answer"),
        ("He bought 3 and ate 1.", "is prose with several numbers"),
        ("more than 4", "has words that change its number"),
        (r"\boxed{4", "has a box or a tag without an end"),
        ("}x{", r"is not equal to '\\\\boxed\{\}x\{\}'"),
    ],
)
def test_each_truth_that_is_refused_is_told_why(truth: Any, message: str):
    with pytest.raises(
        GradingError, match=rf"^reward 'math' cannot grade rows: line 3: the ground truth .* {message}$"
    ):
        check_truths([GradingCase(0, "rows: line 3", "", (), {"answer": truth})])


def test_values_of_a_list_that_are_equal_are_one_truth():
    for completion in (r"\boxed{0.5}", r"\boxed{1/2}"):
        assert grade(completion, answer=["0.5", r"\frac{1}{2}", None]) == 1.0
    assert grade(r"\boxed{0.4}", answer=["0.5", r"\frac{1}{2}"]) == 0.0


@pytest.mark.parametrize("completion", ["", "I do not know", r"\boxed{73}", r"\boxed{}", "#### 7 2", "####"])
def test_other_answers_are_wrong(completion: str):
    assert grade(completion, answer="#### 72") == 0.0


@pytest.mark.parametrize("truth", ["", "####"])
def test_a_ground_truth_that_is_no_mathematics_is_no_fault_of_the_response(truth: str):
    with pytest.raises(ValueError, match="is no mathematics"):
        grade(r"\boxed{72}", answer=truth)


def test_a_missing_ground_truth_is_named():
    with pytest.raises(ValueError, match="no value in any of the columns ground_truth, answer, solution"):
        grade(r"\boxed{72}", question="?")
