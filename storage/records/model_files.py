"""The small files beside the weights (configuration, tokenizer, chat template), kept in the run's directory.

With these copies, the run's url suffices for generation and training. Only text and tokenizer files are copied, never
the code or pickles of a model directory. run.json lists the files with their digests, and no other file is used.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.digests import digest_of
from storage.records import layout
from storage.records.run import read_run
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing, ObjectStore, check_key, commit

SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})
FILE_BYTES_MAX = 64 << 20


def describe(directory: Path) -> dict[str, str]:
    """The digest of each small file of a model directory by its name, without weight indexes and empty files."""
    return {name: digest_of(body) for name, body in _bodies(directory).items()}


def upload(store: ObjectStore, directory: Path) -> dict[str, str]:
    """Copy a model directory's small files into the run; returns their digests by name, for run.json.

    Raises ConflictingRecord if the run already holds a file that differs from the directory or is missing there.
    """
    bodies = _bodies(directory)
    for name in _held(store):
        if name not in bodies:
            raise ConflictingRecord(f"the run already holds {name!r}, which {directory} does not have")
    for name, body in bodies.items():
        if not commit(store, layout.model_file(name), body):
            raise ConflictingRecord(f"the run already holds another {name!r} than {directory}")
    return {name: digest_of(body) for name, body in bodies.items()}


def download(store: ObjectStore, directory: Path) -> None:
    """Write the model files that run.json lists into an existing directory, each one verified.

    Raises CorruptObject, which names the file, if one is missing or has other bytes than run.json says. Nothing is
    written in this case. A file that is not listed is passed over: a second execution that tried to begin the run may
    have left the file.
    """
    listed, bodies = read_run(store).model_files, {}
    for name, digest in sorted(listed.items()):
        key = f"{layout.MODEL}{name}"
        if Path(name).name != name or Path(name).suffix not in SUFFIXES:
            raise CorruptObject(key, f"not a model file; allowed: {', '.join(sorted(SUFFIXES))}")
        try:
            bodies[name] = store.get(key)
        except ObjectMissing:
            raise CorruptObject(key, f"it is missing, and {layout.RUN} lists it") from None
        if digest_of(bodies[name]) != digest:
            raise CorruptObject(key, f"its bytes do not have the digest that {layout.RUN} states")
    for name, body in bodies.items():
        (directory / name).write_bytes(body)


@contextmanager
def downloaded(store: ObjectStore) -> Iterator[Path]:
    """The model files in a directory of their own, until the end of the block; raises what `download` does."""
    with tempfile.TemporaryDirectory(prefix="gleaner-model-") as name:
        directory = Path(name)
        download(store, directory)
        yield directory


def _held(store: ObjectStore) -> list[str]:
    return [key.removeprefix(layout.MODEL) for key in store.list(layout.MODEL)]


def _bodies(directory: Path) -> dict[str, bytes]:
    """The files that are copied, by name; raises ValueError if one is too large, or has a name that is no key."""
    bodies = {}
    for file in sorted(directory.iterdir()):
        if not file.is_file() or file.suffix not in SUFFIXES or file.name.endswith(".index.json"):
            continue
        if file.stat().st_size > FILE_BYTES_MAX:
            raise ValueError(f"{file}: {file.stat().st_size} bytes; allowed beside the weights: {FILE_BYTES_MAX}")
        # A store holds no empty object, and a tokenizer learns nothing from an empty file.
        if body := file.read_bytes():
            check_key(layout.model_file(file.name))
            bodies[file.name] = body
    return bodies
