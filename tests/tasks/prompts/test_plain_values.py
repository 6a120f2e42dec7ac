import json
from datetime import date, datetime, timedelta
from decimal import Decimal

import numpy as np
import pytest

from tasks.prompts.plain_values import DEPTH_MAX, plain


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array([{"role": "user"}], dtype=object), [{"role": "user"}]),
        ((1, (2, None)), [1, [2, None]]),
        ({"b", "a"}, ["a", "b"]),
        ({1: {"x": np.int8(2)}}, {"1": {"x": 2}}),
        (date(2024, 2, 29), "2024-02-29"),
        (datetime(2024, 2, 29, 1, 2), "2024-02-29T01:02:00"),  # noqa: DTZ001 - files hold naive times
        (np.datetime64("2024-02-29"), "2024-02-29"),
        (timedelta(minutes=1), 60.0),
        (Decimal("3.00"), 3),
        (Decimal("0.5"), 0.5),
        (Decimal("0.1234567890123456789"), "0.1234567890123456789"),
        (True, True),
    ],
)
def test_cells_become_plain(value: object, expected: object):
    result = plain(value, "cell")
    assert result == expected
    assert type(result) is type(expected)
    assert json.loads(json.dumps(result)) == expected


def test_what_json_cannot_hold_is_named():
    with pytest.raises(TypeError, match=r"row\.image\[1\]: a value of type bytes is not JSON"):
        plain({"image": [1, b"x"]}, "row")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ab\ud83d", r"row: '\\ud83d' at character 2 is half of a character; remove it"),
        ({"x": ["", "\udc00b"]}, r"row\.x\[1\]: '\\udc00' at character 0 is half of a character"),
        ({"x": {"\ud83d": 1}}, r"row\.x: a name: '\\ud83d' at character 0"),
        (np.array(["\ud83d"]), r"row\[0\]: '\\ud83d' at character 0"),
    ],
)
def test_text_that_is_no_unicode_is_named(value, message):
    with pytest.raises(ValueError, match=message) as caught:
        plain(value, "row")
    assert str(caught.value).isprintable()


def test_whole_pairs_and_every_other_character_are_text():
    text = "\U0001f600 \u2028\ufffe\x00"
    assert plain(text, "row") == text


def test_depth_is_bounded():
    nested: object = 1
    for _ in range(DEPTH_MAX):
        nested = [nested]
    assert plain(nested, "row") == nested
    with pytest.raises(ValueError, match=r"row\[0\].*: nested more than 100 levels deep"):
        plain([nested], "row")
