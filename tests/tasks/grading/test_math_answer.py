from typing import Any

import pytest

from tasks.grading.math_answer import grade_mathematics
from tasks.grading.reward import GradingCase


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
