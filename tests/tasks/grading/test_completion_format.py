import signal
import subprocess
import sys
import time

import pytest

from tasks.grading.completion_format import FormatVerifier

THINKING = r"<think>.*?</think>\s*<answer>.*?</answer>"


@pytest.fixture
def verifier():
    """In this process, whose own use of the alarm comes back afterwards."""
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    yield FormatVerifier(THINKING, 10.0)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


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


@pytest.mark.slow
def test_a_process_that_nobody_watches_ends_itself():
    """In a match no other thread runs, so that the end of the parent cannot be noticed there."""
    script = "from tasks.grading.completion_format import FormatVerifier as F; F('(a+)+b', -0.5).grade('a' * 60)"
    started_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], timeout=600, check=False)
    assert done.returncode == -14  # SIGALRM
    assert time.monotonic() - started_s < 300
