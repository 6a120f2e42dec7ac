import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.reporting import svg

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (-0.5, "-0.5"),
        (100, "100"),
        (12.5, "12.5"),
        (1234, "1,234"),
        (12_345, "12.35k"),
        (2_500_000, "2.5M"),
        (7e9, "7G"),
        (1.2e-4, "1.2e-04"),
        (3e20, "3.0e+20"),
    ],
)
def test_short_numbers(value: float, shown: str):
    assert svg.short(value) == shown


@given(NUMBERS, st.floats(1e-6, 1e9), st.booleans())
def test_ticks_are_few_inside_and_evenly_spaced(low: float, span: float, whole: bool):
    high = low + span
    if not low < high or span < abs(low) * 1e-9:
        return
    found = svg.ticks(low, high, whole=whole)
    margin = (high - low) * 1e-3 + abs(low) * 1e-9
    assert len(found) <= 8
    assert all(low - margin <= tick <= high + margin for tick in found)
    assert not whole or all(float(tick).is_integer() for tick in found)
    assert whole or len(found) >= 2


@given(st.floats(1e-9, 1e12))
def test_round_step_is_round_and_the_smallest(step: float):
    found = svg.round_step(step)
    leading = found / 10.0 ** math.floor(math.log10(found * (1 + 1e-12)))
    assert any(math.isclose(leading, factor, rel_tol=1e-9) for factor in (1, 2, 2.5, 5))
    assert step * (1 - 1e-6) <= found <= step * 2.5


@given(st.lists(NUMBERS, min_size=1))
def test_padded_range_is_never_empty(values: list[float]):
    low, high = svg.padded(values)
    assert low < min(values) <= max(values) < high


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ([0.0004, 0.0006, 0.0008, 0.001, 0.0012], ["0.0004", "0.0006", "0.0008", "0.001", "0.0012"]),
        ([0.0, 0.00125, 0.0025], ["0", "0.00125", "0.0025"]),
        ([-0.5, 0.0, 0.5, 1.0], ["-0.5", "0", "0.5", "1"]),
        ([0.0, 2e-9, 4e-9], ["0", "2e-09", "4e-09"]),
        ([900.0, 1000.0, 1100.0], ["900", "1,000", "1,100"]),
        ([0.0, 20_000.0, 40_000.0], ["0", "20k", "40k"]),
        ([123_450.0, 123_460.0], ["123,450", "123,460"]),
        ([20_000.1, 20_000.2, 20_000.3], ["20,000.1", "20,000.2", "20,000.3"]),
        ([5.0, 5.0 + 1e-9], ["5", "5.000000001"]),
        ([1e17, 1e17, 1e17 + 16], ["1e+17", "1e+17", "1.0000000000000002e+17"]),
        ([7.0], ["7"]),
        ([], []),
    ],
)
def test_ticks_are_told_apart(found: list[float], shown: list[str]):
    assert svg.tick_labels(found) == shown


@given(NUMBERS, st.floats(1e-6, 1e9), st.booleans())
def test_no_two_ticks_read_the_same(low: float, span: float, whole: bool):
    found = svg.ticks(low, low + span, whole=whole) if low < low + span else []
    assert len(set(svg.tick_labels(found))) == len(set(found))


def test_text_and_attributes_are_escaped():
    drawing = ET.fromstring(svg.card('<b> & "x"', 50, [svg.text(0, 0, "</text><script>", fill='"><script>')]))
    assert drawing.findtext("{*}title") == '<b> & "x"'
    assert [node.text for node in drawing.iter() if node.tag.endswith("text")] == ['<b> & "x"', "</text><script>"]
    assert not [node for node in drawing.iter() if node.tag.endswith("script")]


def test_frame_maps_the_ranges_onto_its_edges():
    frame = svg.Frame(100, 10, 300, 110, (5.0, 7.0), (-1.0, 1.0))
    assert [frame.x(5.0), frame.x(6.0), frame.x(7.0)] == [100, 200, 300]
    assert [frame.y(-1.0), frame.y(1.0)] == [110, 10]
