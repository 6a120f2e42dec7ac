"""How far a command is: one line on standard error, on a terminal alone, which is gone when the command has ended."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
import rich.progress

from tasks.reporting.terminal import Terminal


class ProgressLine:
    """The line of one command. The line appears with the first `tell`: earlier output is not disturbed."""

    def __init__(self, *, is_shown: bool) -> None:
        self.is_shown = is_shown
        self._line: tuple[rich.progress.Progress, rich.progress.TaskID] | None = None
        self._told: tuple[str, int, int] | None = None

    def tell(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show this instead of what was told before; `total` 0 is a length that is not known."""
        if not self.is_shown:
            return
        self._told = (what, done, total)
        shown = f"{what} ({done:,} of {total:,})" if total else what
        if self._line is None:
            made = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.BarColumn(bar_width=24),
                rich.progress.TimeElapsedColumn(),
                console=Terminal(stderr=True),
                transient=True,
                # What goes to standard output may go to a file, so it is not led to the terminal.
                redirect_stdout=False,
            )
            self._line = (made, made.add_task(shown, total=None))
            made.start()
        line, task = self._line
        line.update(task, description=shown, completed=done, total=total or None)

    def say(self, line: str) -> None:
        """Print a line of the command's result to standard output, above the line of progress."""
        told = self._told
        self.end()
        click.echo(line)
        if told is not None:
            self.tell(*told)

    def end(self) -> None:
        """Take the line away; another `tell` brings it back."""
        if self._line is not None:
            self._line[0].stop()
        self._line = self._told = None


@contextmanager
def progress(*, is_wanted: bool = True) -> Iterator[ProgressLine]:
    """The progress of what happens in the block; nothing is shown if standard error is no terminal, or a dumb one.

    is_wanted: False for output that a program reads.
    """
    line = ProgressLine(is_shown=is_wanted and shows_line())
    try:
        yield line
    finally:
        line.end()


def shows_line() -> bool:
    """Whether standard error is a terminal that can show the line."""
    return sys.stderr.isatty() and not Terminal(stderr=True).is_dumb_terminal
