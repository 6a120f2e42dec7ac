"""DraftTotals: what drafts, guessed next tokens that an engine verifies, were worth to a member."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict


@dataclass(frozen=True, kw_only=True)
class DraftTotals:
    """Counts of decode steps by an engine that verifies drafts.

    Attributes:
        steps: the number of steps, in which a step of n responses counts n times.
        tokens: the tokens that the steps gave.
        drafted: the drafts that were verified, less those that fill a step's shape up.
        accepted: how many of them were right and are tokens of a response.
        saved_s: the seconds that plain decoding would have taken longer, less than 0 if drafts cost more than they
            saved; None: not measured.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    saved_s: float | None = None

    def since(self, before: "DraftTotals") -> "DraftTotals":
        """What was counted after `before`, an earlier state of the same counts."""
        return DraftTotals(
            steps=self.steps - before.steps,
            tokens=self.tokens - before.tokens,
            drafted=self.drafted - before.drafted,
            accepted=self.accepted - before.accepted,
            saved_s=None if self.saved_s is None else self.saved_s - (before.saved_s or 0.0),
        )


def summed(counted: Iterable[DraftTotals]) -> DraftTotals:
    """All counts together; seconds are those of the counts that have any."""
    found = list(counted)
    seconds = [each.saved_s for each in found if each.saved_s is not None]
    return DraftTotals(
        steps=sum(each.steps for each in found),
        tokens=sum(each.tokens for each in found),
        drafted=sum(each.drafted for each in found),
        accepted=sum(each.accepted for each in found),
        saved_s=sum(seconds) if seconds else None,
    )
