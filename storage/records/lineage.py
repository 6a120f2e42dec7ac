"""Lineage: what a run has of other runs, as its run.json states: a version, and knowledge of prompts."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from storage.digests import DIGEST_PATTERN


@dataclass(frozen=True, kw_only=True)
class VersionOrigin:
    """A weight version of another run, with which a run begins as version 0.

    Attributes:
        url: the other run.
        version: weight version of the other run.
        digest: digest of the manifest of the version's weights.
        optimizer: digest of the manifest of the version's checkpoint, which is checkpoint 0 of this run; None: a new
            optimizer.
        counted_from: iterations behind version 0, from which the plans of this run count on; 0 with a new optimizer.
        first_prompt: running position of the first prompt; 0 with a new optimizer, or with prompts of another section
            `data`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    url: str
    version: int
    digest: str
    optimizer: str | None = None
    counted_from: int = 0
    first_prompt: int = 0

    def __post_init__(self) -> None:
        for name, digest in (("digest", self.digest), ("optimizer", self.optimizer)):
            if digest is not None and not DIGEST_PATTERN.fullmatch(digest):
                raise ValueError(f"{name}: value {digest!r}; allowed: 32 hexadecimal digits")

    @property
    def text(self) -> str:
        """The origin in words."""
        state = "its optimizer" if self.optimizer else "a new optimizer"
        return f"version {self.version} of {self.url} (digest {self.digest}), with {state}"


@dataclass(frozen=True, kw_only=True)
class PromptsOrigin:
    """What the prompts of a run have of another run: the choice by pass rates, and lengths.

    Attributes:
        url: the other run.
        first, stop: its iterations whose responses count, from `first` up to and without `stop`.
        prompts: prompts of the source, of this run.
        seen: prompts of these with a reward in those iterations.
        below, above: prompts of those that are left out, because their pass rate is below or above the bounds.
        kept: digest of the KeptPromptsRecord; None: all prompts are kept.
        lengths: digest of the table of lengths for the first plans; None without one.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    url: str
    first: int
    stop: int
    prompts: int
    seen: int
    below: int = 0
    above: int = 0
    kept: str | None = None
    lengths: str | None = None

    @property
    def text(self) -> str:
        """The origin in words."""
        chosen = "" if self.kept is None else f", {self.below} below and {self.above} above data.pass_rate are left out"
        lengths = "with" if self.lengths else "without"
        return (
            f"{self.prompts} prompts, {self.seen} of them seen in iterations {self.first}:{self.stop} of {self.url}"
            f"{chosen}; {lengths} learned lengths"
        )


@dataclass(frozen=True, kw_only=True)
class ReplayedGroup:
    """The source of a group of a plan whose responses another run has stored.

    Attributes:
        url: the other run.
        iteration, group: the group's place there.
        weight_version: the version there that sampled the tokens.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    url: str
    iteration: int
    group: int
    weight_version: int


@dataclass(frozen=True, kw_only=True)
class KeptPromptsRecord:
    """The rows of the source that are the prompts of a run, ascending."""

    KIND: ClassVar[str] = "kept prompts"
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    rows: tuple[int, ...]
