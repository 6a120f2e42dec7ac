import pytest

from tasks.grading.answer_units import (
    changes_meaning,
    number_in_words,
    read_unit,
    scale_of,
    without_base,
    without_unit,
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("5", ("5", "")),
        ("5 cm", ("5", "cm")),
        ("5cm", ("5", "cm")),
        ("5 duck eggs", ("5", "duck eggs")),
        (r"\frac{1}{2} \text{ cup}", (r"\frac{1}{2}", r"\text{ cup}")),
        (r"5\text{ cm}^2", ("5", r"\text{ cm}^2")),
        (r"30^\circ", ("30", r"^\circ")),
        ("5 m/s^2", ("5", "m/s^2")),
        ("18 (eggs)", ("18", "eggs")),
        ("x = 5 cm", ("x = 5", "cm")),
        ("5t", ("5t", "")),
        ("5 xy", ("5 xy", "")),
        ("5abc", ("5abc", "")),
        ("2m + 3s", ("2m + 3s", "")),
        (r"5 \sin x", (r"5 \sin x", "")),
        (r"3+4\mathrm{j}", (r"3+4\mathrm{j}", "")),
        ("cm", ("cm", "")),
        ("(1,2)", ("(1,2)", "")),
    ],
)
def test_words_behind_a_number_are_no_part_of_it(text: str, parts: tuple[str, str]):
    assert without_unit(text) == parts


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("cm", "centimeters", False),
        ("cm", "m", True),
        (r"\text{cm}^2", "square centimeters", False),
        ("cm^2", "cm^3", True),
        ("cm^2", "cm", True),
        ("km/h", "kilometers per hour", False),
        ("mph", "miles per hour", False),
        ("mph", "km/h", True),
        ("m/s", "m/s^2", True),
        ("dollars", "$", False),
        ("dollars", "cents", True),
        ("dollars per day", "$", False),
        ("eggs", "cm", False),
        ("units^2", "square units", False),
        ("square units", "cubic units", True),
        (r"^\circ C", r"^\circ F", True),
        (r"^\circ", "degrees", False),
        ("am", "pm", True),
    ],
)
def test_units_differ_where_this_is_certain(one: str, other: str, differ: bool):
    mine, its = read_unit(one), read_unit(other)
    assert mine is not None
    assert its is not None
    assert mine.differs(its) is its.differs(mine) is differ


def test_no_words_are_no_unit():
    assert read_unit("") is None
    assert read_unit("", r"\$") == read_unit("dollars")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("4343_7", ("4343", 7)),
        ("4343_{16}", ("4343", 16)),
        (r"(4343)_{\text{six}}", ("4343", 6)),
        ("4343 in base 6", ("4343", 6)),
        ("a_1", ("a_1", None)),
        ("4343", ("4343", None)),
        ("7_{nought}", ("7_{nought}", None)),
    ],
)
def test_a_base_is_read_apart(text: str, parts: tuple[str, int | None]):
    assert without_base(text) == parts


@pytest.mark.parametrize(
    ("before", "behind", "changes"),
    [
        ("", "eggs", False),
        ("Janet has", "eggs left", False),
        ("not", "", True),
        ("", r"\text{or more}", True),
        ("Step", "", True),
        ("", "steps", False),
        ("half of", "", True),
        ("", "squared", True),
        ("", "cm squared", False),
    ],
)
def test_words_that_change_a_number_are_known(before: str, behind: str, changes: bool):
    assert changes_meaning(before, behind) is changes


def test_scales_multiply():
    assert [scale_of(words) for words in ("eggs", "million", r"\text{ dozen eggs}", "")] == [1, 10**6, 12, 1]


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("zero", 0),
        ("twelve", 12),
        ("Twenty-one", 21),
        ("one hundred and five", 105),
        ("two thousand three hundred", 2300),
        ("a million", None),
        ("twelve eggs", None),
        ("and", None),
        ("", None),
    ],
)
def test_numbers_in_words_are_read(words: str, number: int | None):
    assert number_in_words(words) == number
