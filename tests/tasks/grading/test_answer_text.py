import pytest

from tasks.grading import answer_text


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"\boxed {7}", r"\boxed{7}"),
        (r"\fbox{7}", r"\boxed{7}"),
        (r"$\boxed 72$.", r"$\boxed{72}$."),
        (r"1\,000 and 2{,}000 and 3~000", "1000 and 2000 and 3000"),
        (r"1\,00", r"1\,00"),
        ("1,22", "1, 22"),
        ("1,220 and 12,345,678.5", "1,220 and 12,345,678.5"),
        ("1,2,3 and 1,2345", "1, 2, 3 and 1, 2345"),
    ],
)
def test_notation_becomes_plain(text: str, plain: str):
    assert answer_text.plain_notation(text) == plain


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("72", "72"),
        ("so\n#### 72", "72"),
        ("#### 7\nThis took 3 steps.", "7"),
        ("#### 7 This took 3 steps.", "7"),
        ("#### 1,234. That is all.", "1,234"),
        ("#### $7 in total", "$7"),
        ("#### **7**", "7"),
        ("####\n7", "7"),
        ("#### 1/2", "1/2"),
        ("#### 3 or 4", "3 or 4"),
        ("#### 7 2", "7 2"),
        ("#### 1 and then\n#### 2", "2"),
        ("####", ""),
    ],
)
def test_a_marker_states_the_rest_of_its_line_or_the_number_there(text: str, answer: str):
    assert answer_text.after_marker(text) == answer


@pytest.mark.parametrize(
    ("completion", "outside"),
    [
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a", ""),
        ("<think>a</think>b<think>c", "b"),
        ("<think>a</think><think>b</think>c", "c"),
    ],
)
def test_thoughts_are_no_answers(completion: str, outside: str):
    assert answer_text.outside_thinking(completion) == outside


def test_boxes_may_hold_braces_and_boxes():
    assert answer_text.box_contents(r"\boxed{\frac{1}{2}} \boxed{\}}") == [r"\frac{1}{2}", r"\}"]
    assert answer_text.box_contents(r"\boxed{a\boxed{b}") == [r"a\boxed{b}", "b"]
    assert answer_text.box_contents("none") == []


@pytest.mark.parametrize(
    ("answer", "letters"),
    [("Evelyn", "evelyn"), (r"\text{No Solution}.", "nosolution"), ("x y", "xy"), ("7", None), (r"\pi", None)],
)
def test_letters_are_read_without_their_dress(answer: str, letters: str | None):
    assert answer_text.letters_of(answer) == letters


LARGE = [
    "9^{9^{9^9}}",
    "9^9^9",
    "9**9**9",
    "(1+9)^{99999}",
    "x^{10^{9}}",
    "(10^{10})!",
    "9999!",
    "100!!",
    r"\binom{1000000000}{500000000}",
    r"9^{9 \cdot 9 \cdot 9 \cdot 9}",
    "9" * 5000,
    "{" * 5000,
]
SMALL = ["7", "2^{10}", "2^{2^3}", "e^{x^2}", "10!", r"90^\circ", r"\sum_{n=1}^{100000} n", r"\binom{100}{50}", "x^n!"]


@pytest.mark.parametrize(("text", "is_large"), [*((each, True) for each in LARGE), *((each, False) for each in SMALL)])
def test_numbers_of_too_many_digits_are_recognised(text: str, is_large: bool):
    assert answer_text.is_too_large(text) is is_large
