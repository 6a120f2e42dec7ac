"""Lineage: which version of another run a run begins with, as its run.json states."""

from dataclasses import dataclass

from pydantic import ConfigDict

from storage.digests import DIGEST_PATTERN


@dataclass(frozen=True, kw_only=True)
class VersionOrigin:
    """The version of another run that is version 0 of this run.

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
