"""Findings: the results of the checks of a configuration. A refused check does not end the remaining checks."""

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
    """Several checks were refused; the text has a line for each. errors: the refusals, in order."""

    def __init__(self, errors: Iterable[Exception]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, self.errors)))


@dataclass
class Findings:
    """The results of checks, in the order of the checks.

    A check raises an error of EXPECTED to refuse. Call a check that returns doubts by `doubt`, a check that returns a
    line about its input by `saw`, and any further check by `look`. Leave out a check that needs the result of a refused
    check: a second refusal would say nothing new.

    Attributes:
        seen: A line for each input looked at.
        doubts: A line for each doubt.
        refusals: The error of each refused check.
    """

    seen: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    refusals: list[Exception] = field(default_factory=list)

    def look(self, check: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T | None:
        """The result of `check`; None if `check` refuses."""
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
        """Call `check`, which returns a line about the input looked at."""
        if (line := self.look(check, *arguments, **named)) is not None:
            self.seen.append(line)

    def settled(self) -> list[str]:
        """The lines of `seen`, then the doubts, each after `not sure: `.

        After a refusal raises the refusal, or Refusals for several; the doubts are notes of the error.
        """
        doubts = [f"{UNSURE}{doubt}" for doubt in self.doubts]
        if not self.refusals:
            return [*self.seen, *doubts]
        error = self.refusals[0] if len(self.refusals) == 1 else Refusals(self.refusals)
        for doubt in doubts:
            error.add_note(doubt)
        raise error

    def refuse(self, *errors: Exception) -> None:
        """Keep each refusal once: several checks of a file may refuse in equal words."""
        for error in errors:
            if str(error) not in map(str, self.refusals):
                self.refusals.append(error)
