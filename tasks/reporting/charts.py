"""Charts of numbers as inline SVG: lines over iterations, a histogram, horizontal bars. Pure functions of values.

The time line of the slots has its own module, timeline.py.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from resources.visible_text import markup
from tasks.reporting import svg
from tasks.reporting.svg import PALETTE, Frame

_POINTS_MAX = 200
_MARKED_POINTS_MAX = 30
# Shorter series are read value by value.
_SMOOTHED_FROM = 8
_SMOOTHED_SHARE = 0.1
_SMOOTHED_WINDOW_MIN = 5
# Values closer together, relative to the largest one if that exceeds 1, differ by rounding alone.
_ROUNDING = 1e-9
_BINS = 30
_COLUMN_WIDTH_MAX = 90.0
_LEGEND_ROW = 20.0
# The width of a title's letter, rather too much.
_TITLE_LETTER = 9.6


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    x_label: str,
    y_label: str,
    width: float = svg.WIDTH,
) -> str:
    """Draw a line through the points of each series, in order, and a thick one through the means of neighbours.

    Series of at least 8 points are smoothed: each mean is of the nearest tenth of the points, of 5 at least. Points
    that are not finite are left out. Of a series of more than 200 points 200 are drawn, the first and the last
    included. If all values differ by rounding alone, the drawing says so in words. Ticks assume whole x (iterations).
    A narrower drawing has larger letters where both are scaled to the same width.
    """
    finite = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in series.items()}
    values = [y for points in finite.values() for _, y in points]
    if not values:
        return _in_words("no data", title, width)
    if is_rounding(values):
        return _in_words(f"rounding: {min(values):.3g} to {max(values):.3g}", title, width)
    x_range = svg.padded([x for points in finite.values() for x, _ in points], share=0.02)
    low, high = svg.padded(values)
    legend, below = _legend(list(finite), title, width) if len(finite) > 1 else ([], 0.0)
    # Values that are never negative, such as shares, have an axis from 0.
    y_range = (max(0.0, low) if min(values) >= 0 else low, high)
    frame = Frame(84, 56 + below, width - 28, 270 + below, x_range, y_range)
    is_smoothed = any(len(points) >= _SMOOTHED_FROM for points in finite.values())
    parts = legend + frame.y_axis(y_label)
    parts += frame.x_axis(f"{x_label} (thick: mean of neighbours)" if is_smoothed else x_label, whole=True)
    for (name, points), colour in zip(finite.items(), _colours(len(finite)), strict=True):
        parts += _line(frame, name, points, colour)
    return svg.card(title, 322 + below, parts, width)


def is_rounding(values: Sequence[float]) -> bool:
    """Return True if finite values differ, and only as results of float arithmetic in another order would."""
    spread = max(values) - min(values)
    return 0 < spread <= _ROUNDING * max(1.0, *map(abs, values))


def histogram(values: Sequence[float], title: str, x_label: str) -> str:
    """Counts in about thirty bins of round width (whole for whole values), with median and maximum marked."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return _in_words("no data", title)
    edges, counts = _bins(finite)
    frame = Frame(84, 64, svg.WIDTH - 28, 270, (edges[0], edges[-1]), (0.0, max(counts) * 1.06))
    parts = frame.y_axis("count", whole=True)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        if count:
            parts.append(_column(frame, low, high, count))
    parts += frame.x_axis(x_label, whole=all(float(value).is_integer() for value in finite))
    median = (finite[(len(finite) - 1) // 2] + finite[len(finite) // 2]) / 2
    x = frame.x(median)
    parts.append(svg.line((x, frame.top - 6), (x, frame.bottom), stroke=PALETTE[1], width=1.5))
    summary = f"{len(finite):,} values, median {svg.short(median)}, maximum {svg.short(finite[-1])}"
    parts.append(svg.text(frame.right, 30, summary, text_anchor="end", fill=svg.MUTED))
    middle = (frame.left + frame.right) / 2
    anchor, shift = ("start", 5) if x < middle else ("end", -5)
    parts.append(svg.text(x + shift, frame.top, "median", text_anchor=anchor, fill=PALETTE[1]))
    return svg.card(title, 322, parts)


def bars(parts: Mapping[str, float], title: str, unit: str) -> str:
    """Draw one horizontal bar per part, on one scale from zero; a value that is negative or not finite gets no bar.

    `unit` is "$", written before the value, or another unit, written after the value.
    """
    if not parts:
        return _in_words("no data", title)
    left, right, row = 170, svg.WIDTH - 120, 30
    largest = max((value for value in parts.values() if math.isfinite(value)), default=0.0)
    drawn = [svg.line((left, 48), (left, 52 + row * len(parts)), stroke=svg.MUTED)]
    for index, (name, value) in enumerate(parts.items()):
        y = 52 + row * index
        share = value / largest if largest > 0 and math.isfinite(value) else 0.0
        width = max(0.0, share) * (right - left)
        colour = PALETTE[index % len(PALETTE)]
        drawn.append(svg.element("rect", x=left, y=y + 3, width=width, height=row - 8, fill=colour))
        drawn.append(svg.text(left - 10, y + 19, _clipped(name, 22), text_anchor="end", size=13))
        drawn.append(svg.text(left + width + 8, y + 19, amount(value, unit), size=13))
    return svg.card(title, 66 + row * len(parts), drawn)


def amount(value: float, unit: str) -> str:
    """A value with its unit: $0.0123, $1,234.50, 12.5 s."""
    if unit != "$":
        return f"{svg.short(value)} {unit}".rstrip() if math.isfinite(value) else f"{value}"
    digits = 2 if abs(value) >= 1 or value == 0 else 4 if abs(value) >= 1e-3 else 6
    return f"${value:,.{digits}f}"


def three_digits(value: float) -> str:
    """Return a finite number with three significant digits, aligned in columns; whole parts are never cut."""
    rounded = abs(float(f"{value:.3g}"))
    if rounded >= 1e15 or 0 < rounded < 1e-3:
        return f"{value:.2e}"
    if float(value).is_integer() or rounded >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(rounded))}f}"


def utc(seconds: float) -> str:
    """A time since 1970 as people read it."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")


def duration(duration_s: float) -> str:
    """Whole seconds, minutes or hours, as people say them."""
    seconds = int(duration_s)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def _line(frame: Frame, name: str, points: Sequence[tuple[float, float]], colour: str) -> list[str]:
    """Return the elements of a series: the line, thin below a thick smoothed one, and the points of a short series."""
    if not points:
        return []
    drawn = _thinned(len(points))
    is_smoothed = len(points) >= _SMOOTHED_FROM
    thin = {"stroke_width": 1, "stroke_opacity": 0.4} if is_smoothed else {"stroke_width": 2}
    parts = [_polyline(frame, [points[index] for index in drawn], stroke=colour, **thin)]
    if is_smoothed:
        means = [(points[index][0], _neighbours_mean(points, index)) for index in drawn]
        finite = [mean for mean in means if math.isfinite(mean[1])]
        parts.append(_polyline(frame, finite, stroke=colour, stroke_width=2.5))
    if len(points) <= _MARKED_POINTS_MAX:
        for x, y in points:
            hint = svg.element("title", markup(f"{name}: {svg.short(y)} at {svg.short(x)}"))
            parts.append(svg.element("circle", hint, cx=frame.x(x), cy=frame.y(y), r=3, fill=colour))
    return parts


def _polyline(frame: Frame, points: Sequence[tuple[float, float]], **attributes: float | str) -> str:
    joined = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return svg.element("polyline", points=joined, fill="none", stroke_linejoin="round", **attributes)


def _neighbours_mean(points: Sequence[tuple[float, float]], index: int) -> float:
    """Return the mean of the values around a point; the window is shorter at both ends of the series."""
    half = max(_SMOOTHED_WINDOW_MIN, round(_SMOOTHED_SHARE * len(points))) // 2
    window = points[max(0, index - half) : index + half + 1]
    return sum(y for _, y in window) / len(window)


def _legend(names: Sequence[str], title: str, width: float) -> tuple[list[str], float]:
    """The names with their colours, in rows from the right edge, and how far the rows reach below that of the title."""
    rows: list[list[tuple[str, str]]] = [[]]
    left = width - 48 - _TITLE_LETTER * len(title)
    for name, colour in zip(names, _colours(len(names)), strict=True):
        shown = _clipped(name, 24)
        if left < _legend_width(shown):
            rows.append([])
            left = width - 48
        rows[-1].append((shown, colour))
        left -= _legend_width(shown)
    parts = []
    for row, entries in enumerate(rows):
        x, y = width - 28.0, 30 + _LEGEND_ROW * row
        for shown, colour in reversed(entries):
            parts.append(svg.text(x, y, shown, text_anchor="end", fill=svg.MUTED))
            box = x - _legend_width(shown) + 16
            parts.append(svg.element("rect", x=box, y=y - 10, width=11, height=11, rx=2, fill=colour))
            x -= _legend_width(shown)
    return parts, _LEGEND_ROW * (len(rows) - 1)


def _legend_width(shown: str) -> float:
    """Return the width of a name with its coloured box and the gap on the left."""
    return 8.4 * len(shown) + 34


def _column(frame: Frame, low: float, high: float, count: int) -> str:
    y, width = frame.y(count), max(1.0, min(_COLUMN_WIDTH_MAX, frame.x(high) - frame.x(low) - 1))
    x = (frame.x(low) + frame.x(high) - width) / 2
    hint = svg.element("title", f"{svg.short(low)} to {svg.short(high)}: {count:,}")
    return svg.element("rect", hint, x=x, y=y, width=width, height=frame.bottom - y, fill=PALETTE[0])


def _bins(finite: Sequence[float]) -> tuple[list[float], list[int]]:
    """Edges and counts of sorted values. Bins of width 1 over whole values are centred on them."""
    low, high = finite[0], finite[-1]
    whole = all(float(value).is_integer() for value in finite)
    width = svg.round_step((high - low) / _BINS or max(abs(high) * 0.1, 1e-9))
    if whole:
        width = 1.0 if width <= 1 else svg.round_step(math.ceil(width))
    shift = 0.5 if whole and width == 1 else 0.0
    first = math.floor(low / width + shift)
    counts = [0] * (math.floor(high / width + shift) - first + 1)
    for value in finite:
        counts[math.floor(value / width + shift) - first] += 1
    return [(first + index - shift) * width for index in range(len(counts) + 1)], counts


def _thinned(count: int) -> list[int]:
    """Return the indexes of at most _POINTS_MAX of the points, evenly spaced."""
    if count <= _POINTS_MAX:
        return list(range(count))
    return [round(index * (count - 1) / (_POINTS_MAX - 1)) for index in range(_POINTS_MAX)]


def _colours(count: int) -> list[str]:
    return [PALETTE[index % len(PALETTE)] for index in range(count)]


def _clipped(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def _in_words(words: str, title: str, width: float = svg.WIDTH) -> str:
    return svg.card(title, 90, [svg.text(20, 62, words, fill=svg.MUTED)], width)
