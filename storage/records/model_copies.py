"""Copies of models in a run: files in pieces named by content, and one record per name, written last.

Reward models go by the names of rewards, draft models by a digest of where they come from. A trainer or member on any
machine finds the copies by the run's url. The module does not know what is in the files, but takes only safetensors,
text and tokenizer files, never the code or pickles of a model's directory.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from storage.digests import DIGEST_PATTERN, digest_of
from storage.records import canonical, layout, model_files, records
from storage.records.records import STRICT
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing, ObjectStore, commit
from storage.threads import in_threads

SUFFIXES = model_files.SUFFIXES | {".safetensors"}
# Files that decide which model a directory holds. Other files in it, such as results, do not make it another model.
DECISIVE_SUFFIXES = frozenset({".safetensors", ".model", ".jinja"})
DECISIVE_NAMES = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "config.json",
        "merges.txt",
        "model.safetensors.index.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
CHUNK_BYTES = 64 << 20
MODEL_BYTES_MAX = 2 << 40
TRANSFERS = 4  # pieces in memory at a time


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file in pieces of CHUNK_BYTES, the last piece shorter.

    Attributes:
        bytes: size of the file.
        chunks: 128 bits of each piece's BLAKE3 digest, in hexadecimal.
    """

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
    """The files of a copied model by name. The record's bytes depend on the files alone."""

    KIND: ClassVar[str] = "reward model"
    __pydantic_config__ = STRICT
    files: dict[str, StoredFile]

    def __post_init__(self) -> None:
        for name in self.files:
            if Path(name).name != name or Path(name).suffix not in SUFFIXES:
                raise ValueError(f"files: value {name!r}; allowed: file names that end with {', '.join(SUFFIXES)}")
        size = sum(entry.bytes for entry in self.files.values())
        if size > MODEL_BYTES_MAX:
            raise ValueError(f"files: {size} bytes; allowed: {MODEL_BYTES_MAX}")


def describe(folder: Path) -> RewardModelRecord:
    """Read the files of a directory that `upload` copies.

    Raises ValueError if the files are too large, or change during the call.
    """
    return RewardModelRecord(files={path.name: _described(path) for path in _paths(folder)})


def content_digest(record: RewardModelRecord) -> str:
    """32 hexadecimal digits that name the files of a model."""
    return digest_of(canonical.encode(record))


def stored(store: ObjectStore, name: str) -> RewardModelRecord | None:
    """The copy that the run holds under this name, if any; raises CorruptObject."""
    try:
        return records.read(store, RewardModelRecord, layout.reward_model(name))
    except ObjectMissing:
        return None


def check(store: ObjectStore, name: str, folder: Path, held: RewardModelRecord) -> None:
    """Raise ConflictingRecord, naming a file, if the run holds another model under `name` than `folder`.

    A file in `folder` alone counts only if its name decides which model the folder holds (DECISIVE_NAMES, _SUFFIXES).
    """
    ours = {path.name: path for path in _paths(folder) if path.name in held.files or _is_decisive(path)}
    for file in sorted({*ours, *held.files}):
        if file not in ours or file not in held.files or _described(ours[file]) != held.files[file]:
            raise ConflictingRecord(
                f"{store.url} holds another reward model as {name!r} than {str(folder)!r}; "
                f"the first file to differ is {file!r}"
            )


def upload(store: ObjectStore, name: str, folder: Path) -> None:
    """Copy a model into the run, once.

    Raises ConflictingRecord if the run holds another model under `name`, ValueError if a file changes meanwhile.
    """
    record = describe(folder)

    def send(place: _Place) -> None:
        body = _piece(folder / place.file, place.start, place.bytes)
        key = layout.reward_model_chunk(place.digest)
        if digest_of(body) != place.digest:
            raise ValueError(f"{folder / place.file}: changed while it was read")
        if not commit(store, key, body):
            raise CorruptObject(key, "it holds other bytes than its name says")

    in_threads(TRANSFERS, send, _places(record))
    if not records.commit(store, layout.reward_model(name), record):
        held = records.read(store, RewardModelRecord, layout.reward_model(name))
        check(store, name, folder, held)


def download(store: ObjectStore, name: str, folder: Path) -> None:
    """Write a run's copy into an existing directory, every piece verified.

    Raises ObjectMissing if the run holds no copy of this name, and CorruptObject.
    """
    record = records.read(store, RewardModelRecord, layout.reward_model(name))
    for file, entry in record.files.items():
        with (folder / file).open("wb") as opened:
            opened.truncate(entry.bytes)

    def receive(place: _Place) -> None:
        key = layout.reward_model_chunk(place.digest)
        body = store.get(key)
        if digest_of(body) != place.digest:
            raise CorruptObject(key, "it does not have the digest that its name says")
        if len(body) != place.bytes:
            raise CorruptObject(key, f"it has {len(body)} bytes, and its file {place.file!r} wants {place.bytes}")
        with (folder / place.file).open("r+b") as opened:
            opened.seek(place.start)
            opened.write(body)

    in_threads(TRANSFERS, receive, _places(record))


@dataclass(frozen=True, slots=True)
class _Place:
    """A piece of a file: its first byte, its bytes, and their digest."""

    file: str
    start: int
    bytes: int
    digest: str


def _places(record: RewardModelRecord) -> list[_Place]:
    return [
        _Place(file, start, min(CHUNK_BYTES, entry.bytes - start), digest)
        for file, entry in record.files.items()
        for start, digest in zip(range(0, entry.bytes, CHUNK_BYTES), entry.chunks, strict=True)
    ]


def _paths(folder: Path) -> list[Path]:
    """The files of a directory that are copied, by name."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in SUFFIXES]


def _is_decisive(path: Path) -> bool:
    return path.suffix in DECISIVE_SUFFIXES or path.name in DECISIVE_NAMES


def _described(path: Path) -> StoredFile:
    size = path.stat().st_size
    starts = range(0, size, CHUNK_BYTES)
    digests = in_threads(
        TRANSFERS, lambda start: digest_of(_piece(path, start, min(CHUNK_BYTES, size - start))), starts
    )
    return StoredFile(bytes=size, chunks=tuple(digests))


def _piece(path: Path, start: int, size: int) -> bytes:
    """`size` bytes of a file; raises ValueError if it has become shorter."""
    with path.open("rb") as opened:
        opened.seek(start)
        body = opened.read(size)
    if len(body) != size:
        raise ValueError(f"{path}: changed while it was read")
    return body
