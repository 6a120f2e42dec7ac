"""Text that others wrote, made safe to show in a terminal, in a log or on a page: nothing in it is interpreted.

Whatever a command prints goes through here, because a run's or a fleet's records hold texts of models, data sets and
other machines.
"""

import html
import io
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

# Control characters but line feed and tab; what changes the direction of the text around it; halves of characters.
HIDDEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKS = re.compile("[\t\n]")


def visible(text: str) -> str:
    r"""The text with every control character written out, such as \x1b; line feeds and tabs stay."""
    return HIDDEN.sub(_written_out, text)


def visible_line(text: str) -> str:
    """The same on one line: line feeds and tabs are written out, too."""
    return _BREAKS.sub(_written_out, visible(text))


def shortened(text: str, characters_max: int) -> str:
    """The text, or its beginning and three points where it is longer."""
    return text if len(text) <= characters_max else text[: characters_max - 3] + "..."


def markup(text: str) -> str:
    """The text as HTML."""
    return html.escape(visible(text))


def _written_out(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class VisibleStream(io.TextIOWrapper):
    """A stream in whose text every control character is written out. `raw` is the stream that it stands for."""

    def __init__(self, raw: io.TextIOWrapper) -> None:
        raw.flush()
        self.raw = raw
        super().__init__(
            raw.buffer, encoding=raw.encoding, errors="backslashreplace", line_buffering=True, write_through=True
        )

    def write(self, text: str, /) -> int:
        """Write the text as `visible` shows it."""
        return super().write(visible(text))


class VisibleRecord(logging.LogRecord):
    """A line of a log, on one line: none can be forged by a text that holds line feeds."""

    def getMessage(self) -> str:  # noqa: N802 - as logging calls it
        """The message."""
        return visible_line(super().getMessage())


def show_logs() -> None:
    """From now on nothing that this process logs holds a control character."""
    logging.setLogRecordFactory(VisibleRecord)


@contextmanager
def visible_output() -> Iterator[None]:
    """In the block, standard output and error show every control character that is written to them.

    A terminal's own are written past it, to `plain_stream`.
    """
    before = sys.stdout, sys.stderr
    wrapped = [VisibleStream(each) if isinstance(each, io.TextIOWrapper) else each for each in before]
    sys.stdout, sys.stderr = wrapped
    show_logs()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in wrapped:
            if isinstance(stream, VisibleStream):
                # Else it would close the stream for which it stands.
                stream.detach()


def plain_stream(stream: TextIO) -> TextIO:
    """The stream for which a VisibleStream stands, or the stream itself."""
    return stream.raw if isinstance(stream, VisibleStream) else stream
