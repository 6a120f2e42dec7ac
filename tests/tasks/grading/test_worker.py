import pytest

from tasks.grading.worker import FormatVerifier

THINKING = r"<think>.*?</think>\s*<answer>.*?</answer>"


@pytest.fixture
def verifier():
    return FormatVerifier(THINKING)


@pytest.mark.parametrize(
    "completion", ["<think>a</think><answer>4</answer>", "<think>a\n\nb</think>\n\n<answer>\n4\n</answer>"]
)
def test_the_whole_completion_must_match_over_line_ends(verifier, completion):
    assert verifier.grade(completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "<answer>4</answer>",
        "so: <think>a</think><answer>4</answer>",
        "<think>a</think><answer>4</answer>.",
        "<think>a</think><answer>4",
    ],
)
def test_what_does_not_match_or_only_in_part_is_nothing(verifier, completion):
    assert verifier.grade(completion) == 0.0
