"""How much of a run is kept: the user's numbers. Imports nothing heavy, because every configuration holds them."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field


@dataclass(frozen=True, kw_only=True)
class RetentionConfig:
    """How much of what a run no longer needs stays in its directory.

    Some versions always stay: version 0, the bases of kept versions that are stored as differences, and the versions
    from which iterations under way start.

    Attributes:
        compact: after an iteration is committed, write its responses as a few objects and delete its journal. False
            keeps every journal as it is.
        keep_weights: how many of the newest weight versions are kept.
        keep_checkpoints: how many of the trainer's newest states are kept.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    compact: bool = True
    keep_weights: Annotated[int, Field(ge=2)] = 2
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
