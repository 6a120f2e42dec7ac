"""Findings: what the looks at a configuration found. A look that is refused ends nothing but itself."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from storage.errors import GleanerError, WrongInputError

# What a user, a file or a store can cause.
EXPECTED = (GleanerError, LookupError, ValueError, OSError)
UNSURE = "not sure: "
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Refusals(WrongInputError):  # noqa: N818 - reads as what was found
    """Several looks were refused; the text has a line for each."""

    def __init__(self, errors: Iterable[Exception]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, self.errors)))


@dataclass
class Findings:
    """What was looked at, in lines, what is doubtful, and what is refused; in the order of the looks.

    A function that looks raises one of EXPECTED to refuse. One that returns doubts is called by `doubt`, one that
    returns a line about what it saw by `saw`, and others by `look`. What needs the result of a look that was refused is
    left out: its own refusal would say nothing new.
    """

    seen: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    refusals: list[Exception] = field(default_factory=list)

    def look(self, check: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T | None:
        """The result of `check`; None if it was refused."""
        try:
            return check(*arguments, **named)
        except Refusals as error:
            self.refuse(*error.errors)
        except EXPECTED as error:
            self.refuse(error)
        return None

    def doubt(self, check: Callable[_P, Iterable[str]], *arguments: _P.args, **named: _P.kwargs) -> None:
        """Call `check`, which returns doubts."""
        self.doubts += self.look(check, *arguments, **named) or ()

    def saw(self, check: Callable[_P, str], *arguments: _P.args, **named: _P.kwargs) -> None:
        """Call `check`, which returns a line about what it looked at."""
        if (line := self.look(check, *arguments, **named)) is not None:
            self.seen.append(line)

    def settled(self) -> list[str]:
        """The lines about what was looked at, with `not sure: ` before each doubt.

        If something was refused, raises that error, or Refusals for several; the doubts are its notes.
        """
        doubts = [f"{UNSURE}{doubt}" for doubt in self.doubts]
        if not self.refusals:
            return [*self.seen, *doubts]
        error = self.refusals[0] if len(self.refusals) == 1 else Refusals(self.refusals)
        for doubt in doubts:
            error.add_note(doubt)
        raise error

    def refuse(self, *errors: Exception) -> None:
        """Keep what was refused, once: looks that need the same file may say the same of it."""
        for error in errors:
            if str(error) not in map(str, self.refusals):
                self.refusals.append(error)
