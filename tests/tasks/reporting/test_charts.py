import itertools
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasks.reporting.charts import amount, bars, duration, histogram, line_chart, three_digits

ANY_NUMBERS = st.lists(st.floats(width=32), max_size=50)


def nodes(drawing: str, tag: str) -> list[ET.Element]:
    return [node for node in ET.fromstring(drawing).iter() if node.tag == f"{{http://www.w3.org/2000/svg}}{tag}"]


def words(drawing: str) -> list[str]:
    return [node.text or "" for node in nodes(drawing, "text")]


def all_columns(drawing: str) -> list[tuple[str, float]]:
    """Hint and height of each bar of a histogram; hints of neighbours may read the same."""
    found = [(node.find("{*}title"), node.attrib.get("height", "")) for node in nodes(drawing, "rect")]
    return [(hint.text or "", float(height)) for hint, height in found if hint is not None]


def columns(drawing: str) -> dict[str, float]:
    return dict(all_columns(drawing))


def test_line_chart_draws_every_series_in_its_colour_with_a_legend():
    drawing = line_chart({"mean": [(0, 1.0), (1, 2.0)], "max": [(0, 3.0), (1, 5.0)]}, "Lengths", "iteration", "tokens")
    lines = nodes(drawing, "polyline")
    assert len({line.attrib["stroke"] for line in lines}) == 2
    assert {"Lengths", "iteration", "tokens", "mean", "max"} <= set(words(drawing))
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in lines[1].attrib["points"].split())
    assert x0 < x1
    assert y0 > y1, "larger values are drawn higher up"


@pytest.mark.parametrize("width", [900, 460])
@pytest.mark.parametrize("count", [2, 3, 6, 9])
def test_the_names_in_a_legend_overlap_neither_each_other_nor_the_title_nor_the_axis(count: int, width: float):
    names = ["training", *(f"evaluation {index:06d}" for index in range(1, count))]
    drawing = line_chart({name: [(0, 1.0), (1, 2.0)] for name in names}, "Reward", "iteration", "mean reward", width)
    texts = [node for node in nodes(drawing, "text") if node.text in {"Reward", *names}]
    assert len(texts) == count + 1
    spans: dict[float, list[tuple[float, float]]] = {}
    for node in texts:
        x, letters = float(node.attrib["x"]), len(node.text or "")
        ends = node.attrib.get("text-anchor") == "end"
        # The small letters are about 7 units wide, the title's about 9; a name has its colour before it.
        span = (x - 7 * letters - 18, x) if ends else (x, x + 9 * letters)
        spans.setdefault(float(node.attrib["y"]), []).append(span)
    for row in spans.values():
        row.sort()
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(row))
        assert row[0][0] >= 0
    height = float(ET.fromstring(drawing).attrib["viewBox"].split()[3])
    assert max(spans) + 20 <= min(float(line.attrib["y1"]) for line in nodes(drawing, "line"))
    assert all(float(node.attrib["y"]) < height for node in nodes(drawing, "text"))


def test_line_chart_leaves_out_what_is_not_finite_and_thins_long_series():
    points = [(float(k), math.nan if k == 3 else float(k)) for k in range(5000)]
    drawing = line_chart({"reward": points}, "Reward", "iteration", "reward")
    assert not nodes(drawing, "circle")
    for line in nodes(drawing, "polyline"):
        drawn = line.attrib["points"].split()
        assert len(drawn) == 200
        xs = [float(point.split(",")[0]) for point in drawn]
        assert xs == sorted(xs)


def heights(line: ET.Element) -> list[float]:
    """Of the points of a line, downwards."""
    return [float(point.split(",")[1]) for point in line.attrib["points"].split()]


def test_a_series_of_eight_points_is_smoothed_by_a_thick_line():
    zigzag = [(float(k), float(k % 2)) for k in range(8)]
    thin, thick = nodes(line_chart({"a": zigzag}, "t", "iteration", "y"), "polyline")
    assert float(thin.attrib["stroke-width"]) < float(thick.attrib["stroke-width"])
    assert thin.attrib["stroke"] == thick.attrib["stroke"]
    spread = [max(found) - min(found) for found in map(heights, (thin, thick))]
    assert spread[1] < spread[0] / 2
    # The mean of five values around the middle: 0, 1, 0, 1, 0 is 0.4 of the way up.
    bottom, top = max(heights(thin)), min(heights(thin))
    assert heights(thick)[4] == pytest.approx(bottom + 0.4 * (top - bottom), abs=0.1)
    assert len(nodes(line_chart({"a": zigzag[:7]}, "t", "iteration", "y"), "polyline")) == 1


@pytest.mark.parametrize(
    ("values", "is_storm"),
    [
        ([8.4e-10, 6.3e-10, 4.7e-10], True),
        ([0.5, 0.5 + 1e-12], True),
        ([2e6, 2e6 + 1e-3], True),
        ([8.4e-10, 6.3e-9], False),
        ([0.0, 0.0, 0.0], False),
        ([0.4290, 0.4051], False),
    ],
)
def test_differences_of_rounding_are_said_and_not_drawn(values: list[float], is_storm: bool):
    drawing = line_chart({"a": list(enumerate(values))}, "KL", "iteration", "KL")
    assert any(word.startswith("rounding: ") for word in words(drawing)) == is_storm
    assert bool(nodes(drawing, "polyline")) != is_storm


def test_the_axis_of_shares_begins_at_zero_or_above():
    drawing = line_chart({"a": [(0, 0.0), (1, 2.0)]}, "t", "iteration", "%")
    assert not [word for word in words(drawing) if word.startswith("-")]


def test_histogram_counts_whole_values_and_marks_the_median():
    drawing = histogram([0.0] * 3 + [1.0] * 7, "Rewards", "reward")
    found = columns(drawing)
    assert list(found) == ["-0.5 to 0.5: 3", "0.5 to 1.5: 7"]
    assert found["0.5 to 1.5: 7"] == pytest.approx(found["-0.5 to 0.5: 3"] * 7 / 3, rel=0.01)
    assert "10 values, median 1, maximum 1" in words(drawing)


def test_histogram_of_long_tails_has_round_bins():
    found = columns(histogram([*range(10, 300), 4000], "Lengths", "tokens"))
    assert "0 to 200: 190" in found
    assert "4,000 to 4,200: 1" in found


@example([-4.250000276901069e16, -4.250000706397798e16])
@given(ANY_NUMBERS)
def test_histogram_loses_no_finite_value(values: list[float]):
    bars_of = all_columns(histogram(values, "t", "x"))
    counts = [int(hint.rsplit(": ", 1)[1].replace(",", "")) for hint, _ in bars_of]
    assert sum(counts) == sum(map(math.isfinite, values))
    assert len(counts) <= 40


@given(ANY_NUMBERS)
def test_any_numbers_give_well_formed_drawings(values: list[float]):
    for drawing in (
        line_chart({"a": list(enumerate(values)), "<b>": []}, "<t>", "&", '"'),
        bars({f"part {index}": value for index, value in enumerate(values)}, "<t>", "s"),
    ):
        assert not nodes(drawing, "script")
        assert "nan" not in "".join(str(node.attrib) for node in ET.fromstring(drawing).iter())


def test_bars_share_one_scale_from_zero():
    drawing = bars({"rollout": 3.0, "train": 1.0, "other": -2.0, "lost": math.nan}, "Cost", "$")
    widths = [float(node.attrib["width"]) for node in nodes(drawing, "rect")[1:]]
    assert widths[0] == pytest.approx(3 * widths[1], rel=1e-3)
    assert widths[2:] == [0, 0]
    assert {"rollout", "$3.00", "train", "$1.00", "$-2.00", "$nan"} <= set(words(drawing))


@pytest.mark.parametrize("drawing", [line_chart({}, "t", "x", "y"), histogram([], "t", "x"), bars({}, "t", "s")])
def test_nothing_to_draw_says_so(drawing: str):
    assert "no data" in words(drawing)


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (1234.5, "$", "$1,234.50"),
        (0.0123, "$", "$0.0123"),
        (2e-5, "$", "$0.000020"),
        (0, "$", "$0.00"),
        (12.5, "s", "12.5 s"),
    ],
)
def test_amount(value: float, unit: str, shown: str):
    assert amount(value, unit) == shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.546875, "0.547"),
        (0.31, "0.310"),
        (-12.3456, "-12.3"),
        (9.996, "10.0"),
        (99.96, "100"),
        (12345.6, "12,346"),
        (7.0, "7"),
        (0.00123456, "0.00123"),
        (1.2e-9, "1.20e-09"),
        (2e15, "2.00e+15"),
    ],
)
def test_numbers_of_a_column_have_three_digits(value, text):
    assert three_digits(value) == text


@given(st.floats(-1e300, 1e300))
def test_three_digits_are_true_to_half_a_percent(value):
    assert float(three_digits(value).replace(",", "")) == pytest.approx(value, rel=0.0051, abs=0)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.0, "0 s"), (59.9, "59 s"), (60.0, "1 min 00 s"), (3599.0, "59 min 59 s"), (3600.0, "1 h 00 min")],
)
def test_durations(duration_s, text):
    assert duration(duration_s) == text
