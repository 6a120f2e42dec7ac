"""What `math` must not take for right, and the ground truths that it must refuse.

To add a case, add a line to WRONG: a completion and the ground truth; or a truth to REFUSED.
"""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.grading.answer_reading import NoReading, read
from tasks.grading.answer_text import stated
from tasks.grading.math_answer import check_truths, grade_mathematics
from tasks.grading.reward import GradingCase, GradingError


def grade(completion: str, truth: Any) -> float:
    return grade_mathematics(GradingCase(0, "?", completion, (), {"ground_truth": truth}))


WRONG = [
    (r"\boxed{1,2,2}", "1,2"),
    (r"\boxed{1,2}", "1,2,2"),
    (r"\boxed{2+2, 4}", "4"),
    (r"\boxed{4}", "2+2, 4"),
    ("<answer>4</answer> no <answer>3</answer>", "4"),
    ("<think><answer>4</answer></think><answer>5</answer>", "4"),
    ("<think><answer>4</answer>", "4"),
    ("<answer>4", "4"),
    ("4</answer>", "4"),
    (r"<answer>4</answer>\boxed{5}", "4"),
    ("<answer>4 or 5</answer>", "4"),
    ("<answer>not 4</answer>", "4"),
    ("<answer>-4</answer>", "4"),
    ("<answer>4, 5</answer>", "4"),
    (r"\boxed{0}", r"\varnothing"),
    (r"\boxed{1 1/2}", "1"),
    (r"\boxed{1 1/2}", "5.5"),
    (r"\boxed{11/2}", "1 1/2"),
    (r"\boxed{5.5}", "1 1/2"),
    (r"\boxed{0.3}", r"0.\overline{3}"),
    (r"\boxed{0.\overline{3}}", "0.3"),
    (r"\boxed{\overline{3}}", "3"),
    (r"\boxed{1 < x < 2}", "[1,2)"),
    (r"\boxed{(1,2)}", "[1,2)"),
    (r"\boxed{[1,2]}", r"1 \le x < 2"),
    (r"\boxed{x > 1}", r"[1,\infty)"),
    (r"\boxed{1 \le x < 3}", "[1,2)"),
    (r"\boxed{\sin 30}", r"\frac{1}{2}"),
    (r"\boxed{\cos 30^\circ}", r"\frac{1}{2}"),
    (r"\boxed{√2}", "2"),
    (r"\boxed{√12}", r"\sqrt{1}2"),
    (r"\boxed{1 23}", "123"),
    (r"\boxed{1,00,00}", "10000"),
    (r"\boxed{2**3}", "6"),
    (r"\boxed{\textbf{(C)}\ 7}", "B"),
    (r"\boxed{\textbf{(C)}\ 7}", "8"),
    (r"\boxed{(C) 8}", r"\textbf{(C)}\ 7"),
    (r"\boxed{(D) 7}", r"\textbf{(C)}\ 7"),
    (r"\boxed{D}", r"\textbf{(C)}\ 7"),
    (r"\boxed{C}", "(B) Paris"),
    (r"\boxed{(C) Paris}", "(B) Paris"),
    (r"\boxed{(B) London}", "(B) Paris"),
    (r"\boxed{(A) and (B)}", "A"),
    (r"\boxed{A, B}", "A"),
    (r"\boxed{A or B}", "A"),
    (r"\boxed{(A)(B)}", "A"),
    (r"\boxed{1e-6}", "1e-5"),
    (r"\boxed{0}", "1e-7"),
    (r"\boxed{2e-7}", "1e-7"),
    ("so it is 4", "4"),
    ("4", "4"),
    ("x=4", "4"),
    ("Therefore $x=4$.", "4"),
    ("$$4$$", "4"),
    ("**4**", "4"),
    ("The answer is not 4.", "4"),
    ("Is the answer 4?", "4"),
    ("The answer is 4 or 5.", "4"),
    ("the answer is 5. Wait, 2+2 is 4", "4"),
    ("What is the answer?", "4"),
    ("#### Step 4", "4"),
    (r"\boxed{5\text{ cm}}", r"5\text{ m}"),
    (r"\boxed{5 cm}", "5 m"),
    (r"\boxed{5\ \mathrm{cm}^2}", r"5\text{ cm}^3"),
    (r"\boxed{5 \text{ cm}^2}", r"5\text{ cm}^3"),
    (r"\boxed{5 cm^2}", "5 cm^3"),
    (r"\boxed{5 km/h}", "5 mph"),
    (r"\boxed{5\text{ m/s}}", r"5\text{ m/s}^2"),
    (r"\boxed{\$5}", "5 cents"),
    (r"\boxed{€5}", r"\$5"),
    (r"\boxed{5 \text{ cm}}", "6 cm"),
    (r"\boxed{5 minutes}", "5 hours"),
    (r"\boxed{10 a.m.}", "10 p.m."),
    (r"\boxed{10:30 \text{ a.m.}}", r"10:30\text{ p.m.}"),
    (r"\boxed{10:30}", "5:15"),
    (r"\boxed{cm}", "5 cm"),
    (r"\boxed{5 x}", "5"),
    (r"\boxed{5t}", "5"),
    (r"\boxed{5abc}", "5"),
    (r"\boxed{5 xy}", "5"),
    (r"\boxed{3+4\mathrm{i}}", "3+4"),
    (r"\boxed{5 \sin x}", "5"),
    (r"\boxed{5 million}", "5"),
    (r"\boxed{5^\circ C}", r"5^\circ F"),
    (r"\boxed{4343_7}", "4343_6"),
    (r"\boxed{4343 \text{ base } 7}", "4343_6"),
    (r"\boxed{4344_6}", "4343_6"),
    (r"\boxed{4", "4"),
    (r"\boxed{5} \boxed{4", "4"),
    (r"\boxed{4} \boxed{5", "4"),
    (r"\boxed{4,4}", "4"),
    (r"\boxed{\{4,4\}}", "4"),
    (r"\boxed{1} or \boxed{2}", "2"),
    (r"\boxed{1}, \boxed{2}", "2"),
    (r"\boxed{}", "4"),
    (r"\boxed{y=4}", "x=4"),
    (r"\boxed{\text{not } 4}", "4"),
    (r"\boxed{x \ne 4}", "4"),
    (r"\boxed{\neq 4}", "4"),
    (r"\boxed{x > 4}", "4"),
    (r"\boxed{\ge 4}", "4"),
    (r"\boxed{4 \text{ or } 5}", "4"),
    (r"\boxed{4 \text{ or more}}", "4"),
    (r"\boxed{at least 4}", "4"),
    (r"\boxed{\text{at least } 4}", "4"),
    (r"\boxed{\text{less than } 4}", "4"),
    (r"\boxed{-4}", "4"),
    ("\\boxed{3\u20135}", "-2"),
    (r"\boxed{(1,2)}", "(2,1)"),
    (r"\boxed{[1,2]}", r"\{1,2\}"),
    (r"\boxed{(1,2)}", "[1,2]"),
    (r"\boxed{1,2,3}", "1,2"),
    (r"\boxed{1,2}", "1,2,3"),
    (r"\boxed{1,2,3,\ldots}", "1,2,3"),
    (r"\boxed{\pm 3}", "3"),
    (r"\boxed{3}", r"\pm 3"),
    (r"\boxed{\begin{pmatrix}1\\3\end{pmatrix}}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"\boxed{\langle 1,2 \rangle}", "1.2"),
    (r"\boxed{1.234,56}", "1234.56"),
    (r"\boxed{3,5}", "3.5"),
    (r"\boxed{9\%}", "90"),
    (r"\boxed{0.33}", r"\frac{1}{3}"),
    (r"\boxed{4:3}", "3:4"),
    (r"\boxed{May 20}", r"\text{June 20}"),
    (r"\boxed{20}", r"\text{June 20}"),
    (r"\boxed{\pi}", "3.14"),
    (r"\boxed{52}", "5\u00b2"),
    (r"\boxed{1 000}", "0"),
    (r"\boxed{1.000}", "1000"),
    (r"\boxed{i}", "-i"),
    (r"\boxed{4/0}", "4"),
    (r"\boxed{4x=16}", "4"),
    (r"\boxed{4}", True),
    ("#### 5 cm", "5 m"),
    ("#### 4 is wrong", "4"),
    ("#### 4 or 5", "4"),
    ("#### 4 and 5", "4"),
    (r"\boxed{3-4i}", "3+4i"),
    (r"\boxed{3,14}", "3.14"),
    (r"\boxed{1.000,5}", "1000.5"),
    (r"\boxed{1 000,5}", "1000.5"),
    (r"\boxed{12,50 €}", "12.50"),
    (r"\boxed{yes}", "no"),
    (r"\boxed{no}", "on"),
    (r"\boxed{even}", "odd"),
    (r"\boxed{\text{None}}", "0"),
    (r"\boxed{x<2}", r"(-\infty,2]"),
    (r"\boxed{(-\infty, 2]\cup(3,\infty)}", r"(-\infty,2)\cup (3,\infty)"),
    (r"\boxed{[0,1]}", "(0,1)"),
    (r"\boxed{(3,2,1)}", "(1,2,3)"),
    (r"\boxed{(1,2),(3,5)}", "(3,4),(1,2)"),
    (r"\boxed{2,2}", "2"),
    (r"\boxed{2}", "2,2"),
    (r"\boxed{2, 2.0}", "2"),
    (r"\boxed{x+1}", "x-1"),
    (r"\boxed{x/2}", "2/x"),
    (r"\boxed{y=2x+2}", "y=2x+1"),
    (r"\boxed{4\quad 5}", "45"),
    (r"\boxed{4 5}", "20"),
    (r"\boxed{4~5}", "45"),
    (r"\boxed{100!}", "99!"),
    (r"\boxed{1,234,56}", "123456"),
    (r"\boxed{1234567}", "1,234,568"),
    (r"\boxed{13}", "12%"),
    (r"\boxed{A=4\text{ cm}^2}", r"4\text{ cm}^3"),
    (r"\boxed{\frac{\pi}{6}}", r"30^\circ"),
    (r"\boxed{45°}", "46"),
    (r"\boxed{5 \text{ hours and } 3 \text{ minutes}}", "5"),
    (r"\boxed{5 feet 3 inches}", "5"),
    (r"\boxed{5 \text{ ft } 3 \text{ in}}", r"5 \text{ ft } 4 \text{ in}"),
    ("The answer is (C), not (B).", "B"),
    ("The answer is A or B", "A"),
    (r"\boxed{ABC}", "A"),
    (r"\boxed{ACB}", "ABC"),
    (r"\boxed{f(x)}", "f"),
    (r"\boxed{-x}", "x"),
    (r"\boxed{|x|}", "x"),
    ("I think \\boxed{4}.\n\nHowever, the answer is 5.", "5"),
    ("Answer: 4\nAnswer: 5", "4"),
    ("<answer></answer>", "4"),
    ("<answer>?</answer>", "4"),
    ("<answer>$</answer>", "4"),
    ("<answer>The answer is</answer>", "4"),
    ("<answer>I got 3 and then 4</answer>", "4"),
]

REFUSED = [
    "more than 18",
    {"target": 98, "numbers": [1, 2]},
    [1, 2],
    '["4"]',
    [],
    "Tom walked 3 1/2 miles and then 3 1/2 more",
    r"\boxed{4",
    "He bought 3 apples and ate 1.",
    "5 hours 3 minutes",
    float("nan"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("completion", "truth"), WRONG)
def test_wrong_answers_are_wrong_however_they_are_written(completion: str, truth: Any):
    assert grade(completion, truth) == 0.0


@pytest.mark.parametrize("truth", REFUSED)
def test_truths_that_no_answer_would_equal_are_refused(truth: Any):
    with pytest.raises(GradingError, match=r"^reward 'math' cannot grade rows\.jsonl: line 7: the ground truth "):
        check_truths([GradingCase(0, "rows.jsonl: line 7", "", (), {"answer": truth})])


def test_a_list_of_a_thousand_equal_numbers_is_not_the_number():
    assert grade(rf"\boxed{{{', '.join(['4'] * 1000)}}}", "4") == 0.0
    assert grade(rf"\boxed{{{', '.join(['4'] * 100)}}}", "4") == 0.0
    assert grade(rf"\boxed{{{'='.join(['4'] * 1000)}}}", "4") == 0.0
    assert grade(" ".join([r"\boxed{4}"] * 1000), "4") == 1.0


@given(text=st.text(st.sampled_from(r"0123456789 .,-+/*^_={}()[]\$%abcxABisnotr<>|&~'"), max_size=40))
def test_no_text_is_more_than_read_or_not_read(text: str):
    with contextlib.suppress(NoReading):
        read(text)


PIECES = [
    *("4", "5", " ", "\n", ". ", "x", "=", "$", r"\frac{1}{2}", "so", "the sum", "therefore", "thus", "**", "is", ":"),
    *(r"\[", r"\]", r"\(", r"\)", "Step 4", "# 4", "### Result\n4", "(B)", "solution:", "result = 4", "4 eggs"),
]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=20))
def test_a_text_without_a_mark_states_no_answer(pieces: list[str]):
    assert stated("".join(pieces)) == []
