"""Reward models of a run: their files in pieces named by content, and one record per name, written last.

So a trainer on another machine needs nothing but the run's url. Knows nothing of what is in the files, but takes only
safetensors, text and tokenizer files: code and pickles of a model's folder never travel.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from storage import layout, model_files, records
from storage.records import FORMAT_VERSION, STRICT
from storage.store import ConflictingRecord, CorruptObject, ObjectMissing, ObjectStore, commit
from storage.weight_manifest import DIGEST_PATTERN, digest_of
from storage.weight_threads import in_threads

SUFFIXES = model_files.SUFFIXES | {".safetensors"}
CHUNK_BYTES = 64 << 20
TRANSFERS = 4  # pieces in memory at a time


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of `bytes` bytes, in pieces of CHUNK_BYTES and a last one: the first 128 bits of their BLAKE3 digests."""

    __pydantic_config__ = STRICT
    bytes: int
    chunks: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.bytes < 0 or len(self.chunks) != -(-self.bytes // CHUNK_BYTES):
            raise ValueError(f"bytes: value {self.bytes}; allowed: as many as {len(self.chunks)} chunks hold")
        if not all(map(DIGEST_PATTERN.fullmatch, self.chunks)):
            raise ValueError("chunks: allowed: names of 32 hexadecimal digits")


@dataclass(frozen=True, kw_only=True)
class RewardModelRecord:
    """The files of a reward model by name. Its bytes depend on the files alone."""

    __pydantic_config__ = STRICT
    format: Literal[1] = FORMAT_VERSION
    files: dict[str, StoredFile]

    def __post_init__(self) -> None:
        for name in self.files:
            if Path(name).name != name or Path(name).suffix not in SUFFIXES:
                raise ValueError(f"files: value {name!r}; allowed: file names that end with {', '.join(SUFFIXES)}")


def describe(folder: Path) -> RewardModelRecord:
    """Read all files of a folder that would travel."""
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in SUFFIXES]
    files = {}
    for path in paths:
        size = path.stat().st_size
        starts = range(0, size, CHUNK_BYTES)
        digests = in_threads(TRANSFERS, lambda start, path=path: digest_of("blake3", _piece(path, start)), starts)  # type: ignore[misc]
        files[path.name] = StoredFile(bytes=size, chunks=tuple(digests))
    return RewardModelRecord(files=files)


def stored(store: ObjectStore, name: str) -> RewardModelRecord | None:
    """What the run holds under this name, if anything; raises CorruptObject."""
    try:
        return records.read(store, RewardModelRecord, layout.reward_model(name))
    except ObjectMissing:
        return None


def check(store: ObjectStore, name: str, folder: Path, held: RewardModelRecord) -> None:
    """Raise ConflictingRecord, naming a file, when the run holds another reward model under `name` than `folder`."""
    ours = describe(folder).files
    for file in sorted({*ours, *held.files}):
        if ours.get(file) != held.files.get(file):
            raise ConflictingRecord(
                f"{store.url} holds another reward model as {name!r} than {str(folder)!r}; "
                f"the first file to differ is {file!r}"
            )


def upload(store: ObjectStore, name: str, folder: Path) -> None:
    """Copy a reward model into the run, once.

    Raises ConflictingRecord when the run holds another one under `name`, ValueError when a file changes meanwhile.
    """
    record = describe(folder)

    def send(place: tuple[str, int, str]) -> None:
        file, start, digest = place
        body = _piece(folder / file, start)
        if digest_of("blake3", body) != digest:
            raise ValueError(f"{folder / file}: changed while it was read")
        if not commit(store, layout.reward_model_chunk(digest), body):
            raise CorruptObject(layout.reward_model_chunk(digest), "it holds other bytes than its name says")

    in_threads(TRANSFERS, send, _places(record))
    if not commit(store, layout.reward_model(name), records.encode(record)):
        held = records.read(store, RewardModelRecord, layout.reward_model(name))
        check(store, name, folder, held)


def download(store: ObjectStore, name: str, folder: Path) -> None:
    """Write a run's reward model into an existing folder, every piece verified.

    Raises ObjectMissing when the run holds none of this name, CorruptObject.
    """
    record = records.read(store, RewardModelRecord, layout.reward_model(name))
    for file, entry in record.files.items():
        with (folder / file).open("wb") as opened:
            opened.truncate(entry.bytes)

    def receive(place: tuple[str, int, str]) -> None:
        file, start, digest = place
        key = layout.reward_model_chunk(digest)
        body = store.get(key)
        if digest_of("blake3", body) != digest:
            raise CorruptObject(key, "it does not have the digest that its name says")
        with (folder / file).open("r+b") as opened:
            opened.seek(start)
            opened.write(body)

    in_threads(TRANSFERS, receive, _places(record))


def _places(record: RewardModelRecord) -> list[tuple[str, int, str]]:
    """File, first byte and digest of every piece."""
    return [
        (file, number * CHUNK_BYTES, digest)
        for file, entry in record.files.items()
        for number, digest in enumerate(entry.chunks)
    ]


def _piece(path: Path, start: int) -> bytes:
    with path.open("rb") as opened:
        opened.seek(start, os.SEEK_SET)
        return opened.read(CHUNK_BYTES)
