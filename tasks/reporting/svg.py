"""Drawing primitives for the charts: escaped SVG elements, scales, round tick values, short numbers.

Every drawing paints its own card and uses attributes only, so inlined drawings cannot style each other. Colours
are light, unless the surrounding page sets the variables named here. This module knows nothing of runs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from resources.visible_text import markup

WIDTH = 900
INK = "var(--ink, #1b1f24)"
MUTED = "var(--muted, #57606a)"
GRID = "var(--grid, #e3e6ea)"
CARD = "var(--card, #ffffff)"
BORDER = "var(--border, #d0d7de)"
# Okabe and Ito (2008), distinguishable with colour-blindness; without yellow, which is faint on a light card.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def element(name: str, content: str = "", /, **attributes: float | str) -> str:
    """One SVG element. '_' in attribute names becomes '-'; values are escaped, `content` is not."""
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"' for key, value in attributes.items()
    )
    return f"<{name}{rendered}>{content}</{name}>" if content else f"<{name}{rendered}/>"


def text(x: float, y: float, content: str, size: int = 12, fill: str = INK, **attributes: float | str) -> str:
    """A line of escaped text with its baseline at y."""
    return element("text", markup(content), x=x, y=y, font_size=size, fill=fill, **attributes)


def line(start: tuple[float, float], end: tuple[float, float], stroke: str = GRID, width: float = 1) -> str:
    """A straight line."""
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], stroke=stroke, stroke_width=width)


def card(title: str, height: float, parts: Iterable[str], width: float = WIDTH) -> str:
    """The whole drawing: a titled light card, `width` units wide, scaled down to the width of its page."""
    content = [
        element("title", markup(title)),
        element("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=6, fill=CARD, stroke=BORDER),
        text(20, 30, title, size=16, font_weight=600),
        *parts,
    ]
    return element(
        "svg",
        "".join(content),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_attribute(width)} {_attribute(height)}",
        width="100%",
        style=f"max-width:{_attribute(width)}px;display:block",
        font_family=FONT,
        role="img",
    )


@dataclass(frozen=True)
class Frame:
    """A plot area in drawing units and its data ranges.

    Attributes:
        left: The left edge.
        top: The top edge.
        right: The right edge.
        bottom: The bottom edge.
        x_range: (lowest, highest) x of the data.
        y_range: (lowest, highest) y of the data.
    """

    left: float
    top: float
    right: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def x_axis(self, label: str, *, whole: bool = False) -> list[str]:
        """Base line, ticks with numbers, and the label below."""
        parts = [line((self.left, self.bottom), (self.right, self.bottom), stroke=MUTED)]
        found = ticks(*self.x_range, whole=whole)
        for tick, label_of_it in zip(found, tick_labels(found), strict=True):
            x = self.x(tick)
            parts.append(line((x, self.bottom), (x, self.bottom + 4), stroke=MUTED))
            parts.append(text(x, self.bottom + 18, label_of_it, text_anchor="middle", fill=MUTED))
        middle = (self.left + self.right) / 2
        return [*parts, text(middle, self.bottom + 38, label, text_anchor="middle", size=13)]

    def y_axis(self, label: str, *, whole: bool = False) -> list[str]:
        """Grid lines with numbers, and the label turned upwards beside them."""
        parts = []
        found = ticks(*self.y_range, whole=whole)
        for tick, label_of_it in zip(found, tick_labels(found), strict=True):
            y = self.y(tick)
            parts.append(line((self.left, y), (self.right, y)))
            parts.append(text(self.left - 8, y + 4, label_of_it, text_anchor="end", fill=MUTED))
        x, y = 24, (self.top + self.bottom) / 2
        turned = f"rotate(-90 {x} {_attribute(y)})"
        return [*parts, text(x, y, label, text_anchor="middle", size=13, transform=turned)]


def round_step(step: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `step` (positive)."""
    scale = 10.0 ** math.floor(math.log10(step))
    return next(factor * scale for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * scale >= step * (1 - 1e-9))


def ticks(low: float, high: float, count: int = 6, *, whole: bool = False) -> list[float]:
    """About `count` round values in [low, high]; whole numbers only if `whole`."""
    step = round_step((high - low) / count)
    if whole:
        step = max(1.0, step if step.is_integer() else round_step(math.ceil(step)))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_labels(found: Sequence[float]) -> list[str]:
    """The ticks as text: in the first of several ways, from short to exact, in which no two of them read the same."""
    step = (found[-1] - found[0]) / (len(found) - 1) if len(found) > 1 else max(map(abs, found), default=1.0)
    decimals = max(0, math.ceil(2 - math.log10(step or 1.0)))
    largest = max(map(abs, found), default=0.0)
    ways: list[Callable[[float], str]] = [short] if largest >= 1e4 else []
    if decimals <= 7 and largest < 1e15:
        ways.append(lambda tick: _without_zeros(f"{tick + 0.0:,.{decimals}f}"))
    # With 17 digits any two numbers differ.
    ways += [partial(_with_digits, digits) for digits in range(3, 18)]
    shown = ([way(tick) for tick in found] for way in ways)
    return next(labels for labels in shown if len(set(labels)) == len(set(found)))


def padded(values: Sequence[float], *, share: float = 0.06) -> tuple[float, float]:
    """The range of `values` (not empty) with a margin; equal values get a range around them."""
    low, high = min(values), max(values)
    margin = (high - low) * share or (abs(high) * 0.1 if abs(high) > 1e-12 else 0.5)
    return low - margin, high + margin


def short(value: float) -> str:
    """A number in about four characters: 0.00012 -> 1.2e-04, 0.25, 12.5, 1,234, 12.3k, 2.5M."""
    magnitude = abs(value)
    for least, divisor, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if least <= magnitude < 1e15:
            return _trimmed(value / divisor) + suffix
    if magnitude >= 1e15 or 0 < magnitude < 1e-3:
        return f"{value:.1e}"
    return f"{round(value):,}" if magnitude >= 1e3 else _trimmed(value)


def _trimmed(value: float) -> str:
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 100 else 1
    return _without_zeros(f"{value:.{digits}f}")


def _without_zeros(shown: str) -> str:
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def _with_digits(digits: int, value: float) -> str:
    return f"{value:.{digits}g}" if value else "0"


def _attribute(value: float | str) -> str:
    return markup(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
