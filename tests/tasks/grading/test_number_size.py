import pytest

from tasks.grading.number_size import is_too_large

MATRIX = r"\begin{pmatrix}" + r" \\ ".join(["&".join("1" * 60)] * 60) + r"\end{pmatrix}"
LARGE = [
    "9^{9^{9^9}}",
    "9^9^9",
    "9**9**9",
    "(1+9)^{99999}",
    "x^{10^{9}}",
    "(10^{10})!",
    "9999!",
    "100!!",
    "1e99999",
    "2E-12345678901",
    r"\binom{1000000000}{500000000}",
    r"9^{9 \cdot 9 \cdot 9 \cdot 9}",
    "9" * 5000,
    "{" * 5000,
    MATRIX,
    ", ".join(["4"] * 1000),
    r"\sum_{n=1}^{10^6} \frac{1}{n}",
    r"\sum_{n=1}^{1000000} n",
    r"\prod\limits_{n = 1}^{10^5} n",
    r"\sum_{i=1}^{999} \sum_{j=1}^{999} ij",
    r"\int_0^\infty \frac{\sin x}{x} dx",
]
SMALL = [
    *("7", "2^{10}", "2^{2^3}", "e^{x^2}", "10!", r"90^\circ", r"\binom{100}{50}", "x^n!", "1e-5", "6.02e23"),
    *(
        r"\sum_{n=1}^{1000} n",
        r"\sum_{n=1}^{\infty} \frac{1}{n^2}",
        r"\int_0^1 x dx",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    ),
    *(r"\sum", r"\sum_", r"\sum^"),
]


@pytest.mark.parametrize(("text", "is_large"), [*((each, True) for each in LARGE), *((each, False) for each in SMALL)])
def test_what_takes_too_long_is_recognised_by_its_text(text: str, is_large: bool):
    assert is_too_large(text) is is_large
