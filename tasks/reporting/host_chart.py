"""What a host of a fleet spent its time on, as inline SVG: a row for each run, a bar for each stretch of its phases.

A pure function of the host's entries; it knows nothing of where they are stored.
"""

from collections.abc import Mapping, Sequence

from resources.visible_text import markup
from storage.fleet.spent_records import SpentEntry, SpentKind
from tasks.reporting import svg
from tasks.reporting.svg import PALETTE, Frame

ENTRIES_MAX = 300
NAME_LENGTH_MAX = 18
_ROW_HEIGHT, _BAR_HEIGHT = 30, 19
_TOP, _LEFT, _RIGHT = 80, 150, svg.WIDTH - 40
# How each kind is called and drawn; idle time is where no run has a bar.
_KINDS: dict[SpentKind, tuple[str, str]] = {
    "switch": ("its state comes to the device", PALETTE[5]),
    "wait": ("waits for groups", PALETTE[4]),
    "train": ("trains", PALETTE[0]),
    "park": ("its state leaves the device", PALETTE[3]),
}
_KEY_X = (0, 210, 350, 430)


def host_chart(entries: Sequence[SpentEntry], names: Mapping[str, str], own: str, title: str) -> str:
    """Draw a stretch of a host's time; seconds are shown from its beginning.

    entries: in order of time; the last 300 are drawn. names: what each run is called, by id. own: the id of the run
    whose page this is; it is the first row, and only its iterations are told.
    """
    drawn = entries[-ENTRIES_MAX:]
    if not drawn:
        return svg.card(title, 90, [svg.text(20, 62, "no data", fill=svg.MUTED)])
    began_s, duration_s = drawn[0].began_s, max(drawn[-1].ended_s - drawn[0].began_s, 1e-3)
    runs = list(dict.fromkeys([own, *(entry.run for entry in drawn if entry.run is not None)]))
    bottom = _TOP + len(runs) * _ROW_HEIGHT
    axis = Frame(_LEFT, _TOP, _RIGHT, bottom, (0.0, duration_s), (0.0, 1.0))
    parts = _key() + axis.x_axis("seconds")
    parts += [svg.line((axis.x(tick), _TOP - 6), (axis.x(tick), bottom)) for tick in svg.ticks(0.0, duration_s)]
    for row, run in enumerate(runs):
        top = _TOP + row * _ROW_HEIGHT
        parts.append(svg.text(_LEFT - 10, top + 14, _cut(names[run]), text_anchor="end"))
        parts += [_bar(axis, entry, top, began_s, names[run], own) for entry in drawn if entry.run == run]
    return svg.card(title, bottom + 52, parts)


def _bar(axis: Frame, entry: SpentEntry, top: float, began_s: float, name: str, own: str) -> str:
    x = axis.x(entry.began_s - began_s)
    width = max(1.0, axis.x(entry.ended_s - began_s) - x)
    does, colour = _KINDS[entry.kind]
    whose = f"{name}, iteration {entry.iteration}" if entry.run == own else name
    hint = svg.element("title", markup(f"{whose}: {does}, {entry.seconds:.1f} s"))
    return svg.element("rect", hint, x=x, y=top, width=width, height=_BAR_HEIGHT, rx=1, fill=colour)


def _key() -> list[str]:
    """The legend, to the right of the title's line."""
    parts = []
    for x, (does, colour) in zip(_KEY_X, _KINDS.values(), strict=True):
        parts.append(svg.element("rect", x=_LEFT + x, y=46, width=18, height=11, rx=2, fill=colour))
        parts.append(svg.text(_LEFT + x + 24, 56, does, fill=svg.MUTED))
    return parts


def _cut(name: str) -> str:
    return name if len(name) <= NAME_LENGTH_MAX else f"{name[: NAME_LENGTH_MAX - 1]}…"
