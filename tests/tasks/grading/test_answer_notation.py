import pytest

from tasks.grading import answer_notation


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"1\,000 and 2{,}000 and 3~000", "1000 and 2000 and 3000"),
        ("1\u00a0000 000 and 2'000", "1000000 and 2000"),
        (r"1\,00", "1 00"),
        ("1,22", "1, 22"),
        ("1,220 and 12,345,678.5", "1220 and 12345678.5"),
        ("1,2,3 and 1,2345", "1, 2, 3 and 1, 2345"),
        ("12,34,567", "1234567"),
        ("(12,34,567)", "(12, 34, 567)"),
        (r"11,\! 111,\! 100", "11111100"),
        ("1e-5 and 2E3", r"1 \cdot 10^{-5} and 2 \cdot 10^{3}"),
        ("2e-5x", "2e-5x"),
        ("1 1/2", r"\frac{3}{2}"),
        (r"-1\frac{1}{2}", r"-\frac{3}{2}"),
        ("1 3/2", "1 3/2"),
        (r"0.1\overline{6}", r"\frac{1}{6}"),
        (r"2.\dot{3}", r"\frac{7}{3}"),
        ("2**3 + x**-1 + y**(1/2)", "2^{3} + x^{-1} + y^(1/2)"),
        ("**4** eggs", "4 eggs"),
        (r"\sin 30^\circ", r"\sin {(\frac{1}{6}\pi)}"),
        (r"30^\circ", r"30^\circ"),
        ("x\u00b2 + \u221a2 \u2264 \u03c0", r"x^{2} + \sqrt{2}  \le  \pi"),
        ("\uff14\uff12 and \u221212", "42 and -12"),
        ("1\u00bd", r"\frac{3}{2}"),
        (r"\varnothing", r"\emptyset"),
        (r"x \in [1,2)", "[1, 2)"),
        (r"\[ 4 \] and \( 5 \)", "$ 4 $ and $ 5 $"),
        (r"\begin{pmatrix}1\\ 2\end{pmatrix}", r"\begin{pmatrix}1\\ 2\end{pmatrix}"),
        ("4th", "4"),
        (r"3+4\mathrm{i}", "3+4i"),
    ],
)
def test_notation_becomes_plain(text: str, plain: str):
    assert answer_notation.plain_notation(text) == plain


@pytest.mark.parametrize(
    ("answer", "letters"),
    [("Evelyn", "evelyn"), (r"\text{No Solution}.", "nosolution"), ("x y", "xy"), ("7", None), (r"\pi", None)],
)
def test_letters_are_read_without_their_dress(answer: str, letters: str | None):
    assert answer_notation.letters_of(answer) == letters
