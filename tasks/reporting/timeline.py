"""The time line of an iteration as inline SVG: a row per slot, a bar per process life, the cost of each kill.

A pure function of the report's records; knows nothing of their origin.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resources.visible_text import markup
from storage.records.records import SlotLife
from tasks.reporting import svg
from tasks.reporting.costs import life_time
from tasks.reporting.svg import PALETTE, Frame

_LIVES_MAX = 150
_LANE_HEIGHT = 22
_ROW_GAP = 8
_TOP = 80
_LEFT = 96
_LOST = "#cf222e"
_RECOVERED = "#1a7f37"
_TRAINER = PALETTE[1]
_LIFE = PALETTE[4]
STARTING = PALETTE[3]
# Bars are light on a dark page, too.
_ON_BARS = "#1b1f24"


@dataclass(frozen=True)
class _Row:
    """The lives of a slot, without overlap within a lane; the successor of a frozen member gets a lane of its own.

    Attributes:
        slot: The slot.
        lanes: The lives of each lane, in order.
    """

    slot: int
    lanes: tuple[tuple[SlotLife, ...], ...]

    @property
    def height(self) -> int:
        return len(self.lanes) * _LANE_HEIGHT


def timeline(lives: Sequence[SlotLife], train_started_at_s: float, train_ended_at_s: float, title: str) -> str:
    """Draw when each process lived, where a process was lost, and how many tokens the successor recovered.

    Times are seconds since 1970, shown relative to the first event. At most 150 lives are drawn, of the slots with
    most lives; a note counts the remaining slots. A trainer that ended before it started has no bar.
    """
    drawn = _busiest(lives)
    rows = [_row(slot, own) for slot, own in sorted(drawn.items())]
    trained = train_ended_at_s > train_started_at_s
    times = [t for life in lives for t in (life.started_at_s, life.ended_at_s)]
    times += [train_started_at_s, train_ended_at_s] if trained else []
    if not times:
        return svg.card(title, 90, [svg.text(20, 62, "no data", fill=svg.MUTED)])
    start_s, duration_s = min(times), max(max(times) - min(times), 1e-3)
    bottom = _TOP + sum(row.height + _ROW_GAP for row in rows) + (_LANE_HEIGHT + _ROW_GAP) * trained
    frame = Frame(_LEFT, _TOP, svg.WIDTH - 40, bottom, (start_s, start_s + duration_s), (0.0, 1.0))
    axis = Frame(_LEFT, _TOP, svg.WIDTH - 40, bottom, (0.0, duration_s), (0.0, 1.0))
    parts = _key() + axis.x_axis("seconds since the start")
    parts += [svg.line((axis.x(t), _TOP - 6), (axis.x(t), bottom)) for t in svg.ticks(0.0, duration_s)]
    y = _TOP
    for row in rows:
        parts += _drawn_row(frame, row, y)
        y += row.height + _ROW_GAP
    if trained:
        parts += _trainer_bar(frame, y, train_started_at_s, train_ended_at_s)
    left_out = len({life.slot for life in lives}) - len(rows)
    if left_out:
        note = f"{left_out:,} more slots with fewer lives are not drawn"
        parts.append(svg.text(svg.WIDTH - 40, bottom + 38, note, text_anchor="end", fill=svg.MUTED))
    return svg.card(title, bottom + 52, parts)


def _busiest(lives: Iterable[SlotLife]) -> dict[int, list[SlotLife]]:
    by_slot: dict[int, list[SlotLife]] = defaultdict(list)
    for life in sorted(lives, key=lambda life: (life.started_at_s, life.incarnation)):
        by_slot[life.slot].append(life)
    kept: dict[int, list[SlotLife]] = {}
    left = _LIVES_MAX
    for slot in sorted(by_slot, key=lambda slot: (-len(by_slot[slot]), slot)):
        if left <= 0:
            break
        kept[slot] = by_slot[slot][-left:]
        left -= len(kept[slot])
    return kept


def _row(slot: int, lives: Iterable[SlotLife]) -> _Row:
    lanes: list[list[SlotLife]] = []
    for life in lives:
        free = next((lane for lane in lanes if lane[-1].ended_at_s <= life.started_at_s), None)
        if free is None:
            lanes.append([life])
        else:
            free.append(life)
    return _Row(slot, tuple(tuple(lane) for lane in lanes))


def _drawn_row(frame: Frame, row: _Row, y: float) -> list[str]:
    parts = [svg.text(_LEFT - 10, y + 15, f"slot {row.slot}", text_anchor="end", size=12)]
    for number, lane in enumerate(row.lanes):
        top = y + number * _LANE_HEIGHT
        ends = [frame.x(life.started_at_s) for life in lane[1:]] + [frame.right]
        for life, next_start in zip(lane, ends, strict=True):
            parts += _bar(frame, life, top, next_start)
    return parts


def _bar(frame: Frame, life: SlotLife, top: float, next_start: float) -> list[str]:
    """Draw one life: a bar, a triangle for tokens taken over, a cross for a loss, and as many words as fit."""
    x, height = frame.x(life.started_at_s), _LANE_HEIGHT - 3
    width = max(2.0, frame.x(life.ended_at_s) - x)
    middle = top + height / 2
    hint = svg.element("title", markup(_described(life)))
    parts = [svg.element("rect", hint, x=x, y=top, width=width, height=height, rx=2, fill=_LIFE)]
    starting = frame.x(life.started_at_s + life_time(life).starting) - x
    if starting > 0:
        parts.append(svg.element("rect", x=x, y=top, width=starting, height=height, rx=2, fill=STARTING))
    words_left, words_right = x + 6, min(x + width, next_start)
    if life.tokens_recovered:
        arrow = f"{x:.1f},{top:.1f} {x + 11:.1f},{middle:.1f} {x:.1f},{top + height:.1f}"
        parts.append(svg.element("polygon", points=arrow, fill=_RECOVERED))
        words_left = x + 15
    if life.state == "lost":
        parts.append(_cross(x + width, middle))
        words_right -= 9
    # Words do not cross the edge between the colours: they are in the part that generates, or else in the one before.
    edge = x + max(0.0, starting)
    rooms = [(max(words_left, edge + 6), words_right), (words_left, min(words_right, edge))]
    return parts + _words(life, rooms, middle + 4)


def _words(life: SlotLife, rooms: Sequence[tuple[float, float]], y: float) -> list[str]:
    """As many words about a life as one of the rooms, given as (left, right), has space for; the first that has it."""
    words = [f"+{svg.short(life.tokens_recovered)} recovered"] if life.tokens_recovered else []
    words += [f"{svg.short(life.tokens_kept)} tokens"]
    while words:
        joined = ", ".join(words)
        for left, right in rooms:
            if left + 6.3 * len(joined) <= right:
                return [svg.text(left, y, joined, size=11, fill=_ON_BARS)]
        words.pop()
    return []


def _described(life: SlotLife) -> str:
    spent = life_time(life)
    seconds = (
        f"{spent.starting:.1f} s until it had the weights, {spent.useful + spent.wasted:.1f} s of decoding, "
        f"{spent.idle:.1f} s standing by"
    )
    return (
        f"{life.incarnation} ({life.pool}), {spent.total:.1f} s ({seconds}), {life.state}: {life.tokens_kept:,} tokens "
        f"kept, {life.tokens_recovered:,} recovered from its predecessor, {life.tokens_regenerated:,} regenerated"
    )


def _cross(x: float, y: float) -> str:
    r = 6
    strokes = f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}"
    return svg.element("path", d=strokes, stroke=_LOST, stroke_width=3, stroke_linecap="round", fill="none")


def _trainer_bar(frame: Frame, y: float, started_at_s: float, ended_at_s: float) -> list[str]:
    x, height = frame.x(started_at_s), _LANE_HEIGHT - 3
    width = max(2.0, frame.x(ended_at_s) - x)
    hint = svg.element("title", f"trainer, {ended_at_s - started_at_s:.1f} s")
    return [
        svg.text(_LEFT - 10, y + 15, "trainer", text_anchor="end", size=12),
        svg.element("rect", hint, x=x, y=y, width=width, height=height, rx=2, fill=_TRAINER),
    ]


def _key() -> list[str]:
    """The legend, in the line below the title."""
    y = 56
    triangle = f"{_LEFT + 320},{y - 11} {_LEFT + 331},{y - 4} {_LEFT + 320},{y + 3}"
    return [
        _swatch(_LEFT, y, STARTING),
        svg.text(_LEFT + 20, y, "a process starts", fill=svg.MUTED),
        _swatch(_LEFT + 126, y, _LIFE),
        svg.text(_LEFT + 146, y, "and generates", fill=svg.MUTED),
        _cross(_LEFT + 252, y - 4),
        svg.text(_LEFT + 264, y, "killed", fill=svg.MUTED),
        svg.element("polygon", points=triangle, fill=_RECOVERED),
        svg.text(_LEFT + 337, y, "takes over the tokens of its predecessor", fill=svg.MUTED),
        _swatch(_LEFT + 590, y, _TRAINER),
        svg.text(_LEFT + 610, y, "training", fill=svg.MUTED),
    ]


def _swatch(x: float, y: float, colour: str) -> str:
    return svg.element("rect", x=x, y=y - 10, width=14, height=11, rx=2, fill=colour)
