"""What of a run is kept: the user's numbers. Imports nothing heavy, because every configuration holds them."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field


@dataclass(frozen=True, kw_only=True)
class RetentionConfig:
    """How much of what a run no longer needs stays in its directory.

    Version 0, the versions that a kept one is stored as differences to, and whatever the iteration under way starts
    from stay in any case.

    Attributes:
        compact: after an iteration is committed, write its responses as one object and delete its journal. False keeps
            every journal as it is.
        keep_journals: iterations, the newest committed ones, whose journal stays beside that object.
        keep_weights: weight versions, the newest published ones.
        keep_checkpoints: states of the trainer, the newest ones.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    compact: bool = True
    keep_journals: Annotated[int, Field(ge=0)] = 0
    keep_weights: Annotated[int, Field(ge=2)] = 2
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
