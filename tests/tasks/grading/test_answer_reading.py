from fractions import Fraction

import pytest

from tasks.grading.answer_limits import limited_time
from tasks.grading.answer_reading import NoReading, number_of, read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", (7, False)),
        ("-3.50", (Fraction(-7, 2), False)),
        (".5", (Fraction(1, 2), False)),
        ("3/4", (Fraction(3, 4), False)),
        (r"-\frac{3}{4}", (Fraction(-3, 4), False)),
        (r"1.5 \times 10^{3}", (1500, False)),
        (r"9\%", (Fraction(9, 100), True)),
        ("9 percent", (Fraction(9, 100), True)),
        ("(-4)", (-4, False)),
        ("4/0", None),
        ("(4", None),
        (r"1 \cdot 10^{99999}", None),
        ("x", None),
        ("1, 2", None),
    ],
)
def test_plain_numbers_have_their_exact_value(text: str, value: tuple[Fraction, bool] | None):
    assert number_of(text) == value


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("The answer is 4.", "4"),
        ("about 18 eggs", "18"),
        ("Janet has 18 eggs left", "18"),
        ("Tom walked 3 1/2 miles", "7/2"),
        ("so $x = 4$ cm", "x = 4"),
        ("$3$ and $4$", "3, 4"),
        (r"\text{The total is } \$5", "5"),
        ("5 million", "5000000"),
        ("twenty-one", "21"),
        (r"\textbf{(C)}\ 7", "7"),
        (r"\frac{x}{2}", r"\frac{x}{2}"),
    ],
)
def test_what_mathematics_compares_stands_alone(text: str, formula: str):
    assert read(text).formula == formula


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        *(("B", "B"), ("(b)", "B"), (r"\textbf{(C)}\ 7", "C"), ("D) 7", "D"), ("E. x + 1", "E"), ("(A)(B)", None)),
        *(("(A) 4 or (B) 5", None), ("(a)b", None), (r"(A) \cup (B)", None), ("x", None)),
    ],
)
def test_choices_are_told_from_products(text: str, choice: str | None):
    assert read(text).choice == choice


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no mathematics"),
        ("?!", "is no mathematics"),
        ("not 4", "has words that change its number"),
        ("at least $4$", "has words that change its formula"),
        ("he had 3 and ate 1", "is prose with several numbers"),
        ("$x^2$ is what $y^2$ was", "has several formulas in prose"),
        ("speed times mass = x^2", "is prose with a formula"),
        (r"\boxed{4", "has a box or a tag without an end"),
    ],
)
def test_a_text_that_is_not_sure_has_no_reading(text: str, reason: str):
    with pytest.raises(NoReading, match=reason):
        read(text)


def test_a_chain_of_choices_takes_no_stack():
    assert read("A. " * 600).choice == "A"


@pytest.mark.parametrize("sign", [":", "=", ": ", "is:"])
def test_signs_that_lead_in_are_passed_at_once(sign: str):
    with limited_time(5.0):
        assert read(sign * (1_900 // len(sign)) + "4").formula == "4"


@pytest.mark.parametrize("text", ["$$4", "4$$", "so $$ x", "$$1$$ and $$2"])
def test_mathematics_without_an_end_is_no_answer(text: str):
    with pytest.raises(NoReading, match="has mathematics without an end"):
        read(text)
