"""What a run took from the Hugging Face Hub: repositories, the commits, and the rows of data sets, stored in the run.

Later plans, on any machine, read identical rows without the hub. Responses of other runs are kept as the rows of
`data.runs`, with the urls in place of a repository, and a digest of the rows in place of a commit.
"""

import re
from dataclasses import dataclass

from pydantic import ConfigDict

from storage.digests import DIGEST_PATTERN, digest_of
from storage.records import layout
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore, commit

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A repository of the hub, as configured, and its commit.

    Attributes:
        repo, revision: name of the repository and revision, as configured.
        subset, split: of a data set; None for a model.
        commit: 40 hexadecimal digits.
        rows: digests of the Parquet files with the rows, in order; () for a model.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    repo: str
    revision: str | None
    subset: str | None = None
    split: str | None = None
    commit: str
    rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if _COMMIT.fullmatch(self.commit) is None:
            raise ValueError(f"commit: value {self.commit!r}; allowed: 40 hexadecimal digits")
        if not all(map(DIGEST_PATTERN.fullmatch, self.rows)):
            raise ValueError("rows: allowed: names of 32 hexadecimal digits")

    @property
    def asked(self) -> tuple[str, str | None, str | None, str | None]:
        return self.repo, self.revision, self.subset, self.split


def store_rows(store: ObjectStore, pieces: list[bytes]) -> tuple[str, ...]:
    """Write Parquet files, each under its digest; returns the digests."""
    for piece in pieces:
        key = layout.source_rows(digest_of(piece))
        if not commit(store, key, piece):
            raise CorruptObject(key, "it holds other bytes than its name says")
    return tuple(map(digest_of, pieces))


def read_rows(store: ObjectStore, source: HubSource) -> list[bytes]:
    """The Parquet files of a data set, each one verified; raises CorruptObject."""
    pieces = []
    for digest in source.rows:
        key = layout.source_rows(digest)
        try:
            piece = store.get(key)
        except ObjectMissing:
            raise CorruptObject(key, f"it is missing, and {layout.RUN} lists it") from None
        if digest_of(piece) != digest:
            raise CorruptObject(key, "it does not have the digest that its name says")
        pieces.append(piece)
    return pieces
