"""What commands draw on: a terminal, or a page of text, on which stored texts are shown and never interpreted."""

import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from resources.visible_text import plain_stream, visible


class Terminal(Console):
    """A console on which control characters are written out, and no text is markup.

    Its cursor stays shown: a process that a signal ends could not show it again.
    """

    def __init__(self, *, file: IO[str] | None = None, stderr: bool = False, width: int | None = None) -> None:
        if file is None:
            # Its own control characters, such as those of colours, are meant.
            file = plain_stream(sys.stderr if stderr else sys.stdout)
        super().__init__(file=file, stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """A text as it is laid out."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The pieces that are written."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002 - as rich calls it
        """Leave the cursor as it is."""
        return False
