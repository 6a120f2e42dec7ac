r"""Answers that a policy may write against our own verifiers: each counts as 0, and none is a failure of the verifier.

To add a case, add a line to ANSWERS: what stands in the box.
"""

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.configuration.rewards import RewardConfig
from tasks.grading.grader import Grader
from tasks.grading.isolation import IsolatedReward
from tasks.grading.patience import Patience
from tasks.grading.reward import GradingCase, GradingError
from tests.property_examples import part_of_examples

pytestmark = pytest.mark.slow
LIMIT_S = 2.0
LONG = 300.0
# Whether looking at them ends by itself differs between machines, and releases of SymPy.
ANSWERS = {
    "an integral without a value": r"\int_0^\infty \frac{\sin x}{x} dx",
    "two integrals": r"\int_0^1 \int_0^1 \frac{e^{x y^2}\ln(1+x^3 y)}{1+\sin(x y)} dx dy",
    "a long sum": r"\sum_{n=1}^{1000000} \frac{1}{n}",
    "a long product": r"\prod_{k=1}^{100000} k^k",
    "a limit": r"\lim_{x\to\infty} \left(1+\frac{\sin x}{x}\right)^{x^{\sin x}}",
    "a matrix": r"\begin{pmatrix}" + r"\\".join("&".join("xyzw"[j % 4] for j in range(60)) for _ in range(60)),
    "a power of a sum": "(x+y+z+w+v)^{200}",
    "a chain of equations": " = ".join(f"x^{power}+1" for power in range(2000)),
    "a large set": r"\{" + ",".join(map(str, range(5000))) + r"\}",
    "a long sum of ones": "1+" * 20_000 + "1",
    "nested braces": "{" * 5000 + "1" + "}" * 5000,
    "nested brackets": "(" * 3000 + "1" + ")" * 3000,
    "nested fractions": r"\frac{1}{" * 800 + "1" + "}" * 800,
    "nested roots": r"\sqrt{" * 1500 + "2" + "}" * 1500,
    "brackets without an end": "(" * 3000,
    "a number with many digits": "9" * 200_000,
    "a tower": "9^{9^{9^{9^9}}}",
    "a large power": "2^{1000000000}",
    "a large factorial": "1000000!",
    "a large binomial coefficient": r"\binom{1000000}{500000}",
    "many boxes": r"1}\boxed{" * 3000,
    "half a surrogate pair": "\ud800",
    "control characters": "\x00\x01\x7f",
    "an unknown command": r"\nosuch{\begin{nothing}}",
}
THINKING = r"(?:<think>(?:\s*\w+\s*)*</think>)+<answer>.*?</answer>"


def case(response: int, completion: str, answer: str = "4") -> GradingCase:
    return GradingCase(response, "?", completion, (1,), {"answer": answer})


@pytest.fixture(scope="module")
def loaded() -> Iterator[Grader]:
    with Grader([RewardConfig(function="math", time_limit_s=LIMIT_S, on_failure="stop")]) as found:
        yield found


@pytest.fixture
def mathematics(loaded: Grader) -> Grader:
    """The same process in each test, with new patience."""
    [reward] = loaded._rewards
    assert isinstance(reward, IsolatedReward)
    reward._patience = Patience(LIMIT_S)
    return loaded


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_no_answer_is_a_failure_of_math_and_the_next_one_is_graded(mathematics: Grader, answer: str):
    found, after = mathematics.grade([case(0, f"so \\boxed{{{answer}}}"), case(1, r"\boxed{4}")])
    assert (found.reward, found.errors) == (0.0, {})
    assert (after.reward, after.errors, after.given_up) == (1.0, {}, {})


PIECES = [*"\\{}()[]^_&%$#0123456789+-*/=<>,.;|! xyzinfe\n\ud800", r"\frac", r"\boxed{", "####"]
TEXTS = st.lists(st.sampled_from(PIECES)).map("".join)


@settings(max_examples=part_of_examples(0.5), deadline=None, suppress_health_check=list(HealthCheck))
@given(TEXTS)
def test_no_text_is_a_failure_of_math(mathematics: Grader, text: str):
    [found] = mathematics.grade([case(0, text)])
    assert found.errors == {}


def test_an_iteration_of_nothing_but_such_answers_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Every answer of the first micro-batch is given up, though all that fail would end grading."""
    monkeypatch.setattr("tasks.grading.grader.FAILED_SHARE_MAX", 0.0)
    config = RewardConfig(function="math", time_limit_s=0.5)
    answer = ANSWERS["two integrals"]
    with Grader([config]) as grader:
        graded = grader.grade([case(number, f"\\boxed{{{answer}}}") for number in range(6)])
    assert {each.reward for each in graded} == {0.0}
    assert all(each.given_up["math"].startswith("reward math of response ") for each in graded)
    assert "reward math: responses of this iteration for which it hung: 1; " in caplog.text
    assert "reward math gave up on 6 of 6 answers, which count as 0; the first: reward math of resp" in caplog.text


def test_text_on_which_an_expression_goes_back_and_forth_is_given_up():
    """The expression is one that a user might write for thoughts and an answer."""
    with Grader([RewardConfig(function="format", arguments={"pattern": THINKING}, time_limit_s=LIMIT_S)]) as grader:
        right = "<think>a b</think><answer>4</answer>"
        graded = grader.grade([case(0, right), case(1, "<think>" + "a" * 60 + "!"), case(2, right)])
    assert [(each.reward, each.errors) for each in graded] == [(1.0, {}), (0.0, {}), (1.0, {})]
    assert [bool(each.given_up) for each in graded] == [False, True, False]
    assert graded[1].given_up["format"] == "reward format of response 1 did not answer within 2 s"


def test_text_for_which_an_expression_needs_too_much_memory_is_given_up():
    config = RewardConfig(function="format", arguments={"pattern": "(a|b)*c"}, time_limit_s=LONG)
    with Grader([config]) as grader:
        graded = grader.grade([case(0, "ab" * 8_000_000), case(1, "abc")])
    assert "raised MemoryError" in graded[0].given_up["format"]
    assert [each.reward for each in graded] == [0.0, 1.0]


def test_an_answer_that_ends_the_process_is_given_up_and_the_next_one_is_graded():
    """A signal stands for what SymPy's and re's extensions may do."""
    reward = IsolatedReward("format", "format", LONG, LONG, {"pattern": "(a+)+b"})
    try:
        process = reward._worker._process
        assert process is not None
        threading.Timer(0.5, os.kill, (process.pid, signal.SIGSEGV)).start()
        ended, after = reward.grade([case(0, "a" * 60), case(1, "aab")])
    finally:
        reward.close()
    assert (ended.value, ended.error) == (0.0, None)
    assert ended.given_up == f"reward format of response 0 ended its process with status -{signal.SIGSEGV:d}"
    assert (after.value, after.given_up) == (1.0, None)


def test_a_row_without_a_truth_is_still_a_failure():
    with (
        Grader([RewardConfig(function="math")]) as grader,
        pytest.raises(
            GradingError, match="the first error: reward math of response 0 raised ValueError: the ground trut"
        ),
    ):
        grader.grade([case(0, r"\boxed{4}", "")])


def test_a_verifier_that_cannot_be_started_again_is_a_failure():
    """That is no answer's fault: a machine without memory must not give 0 to every response."""
    reward = IsolatedReward("format", "format", LONG, 0.001 + LONG, {"pattern": "a"})
    reward._worker.kill()
    reward._worker._load_time_limit_s = 0.001
    try:
        with pytest.raises(GradingError, match=r"reward 'format' cannot be loaded: it did not answer within 0.001 s"):
            reward.grade([case(0, "a")])
    finally:
        reward.close()
