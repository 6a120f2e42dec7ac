"""The small files beside the weights (configuration, tokenizer, chat template), kept in the run's directory.

So the run's url is all that is needed to generate or to train. Only text and tokenizer files are copied, never the code
or pickles of a model directory.
"""

from pathlib import Path

from storage import layout
from storage.store import ConflictingRecord, ObjectStore, commit

SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})
FILE_BYTES_MAX = 64 << 20


def upload(store: ObjectStore, directory: Path) -> list[str]:
    """Copy a model directory's small files into the run, without weight indexes; returns the names copied.

    Raises ConflictingRecord if the run already holds another file of that name.
    """
    names = []
    for file in sorted(directory.iterdir()):
        if not file.is_file() or file.suffix not in SUFFIXES or file.name.endswith(".index.json"):
            continue
        if file.stat().st_size > FILE_BYTES_MAX:
            raise ValueError(f"{file}: {file.stat().st_size} bytes; allowed beside the weights: {FILE_BYTES_MAX}")
        body = file.read_bytes()
        if body and not commit(store, layout.model_file(file.name), body):
            raise ConflictingRecord(f"the run already holds another {file.name!r} than {directory}")
        names.append(file.name)
    return names


def download(store: ObjectStore, directory: Path) -> None:
    """Write the run's model files into an existing directory."""
    for key in store.list(layout.MODEL):
        name = key.removeprefix(layout.MODEL)
        if "/" in name or Path(name).suffix not in SUFFIXES:
            raise ValueError(f"object {key!r} is not a model file; allowed: {', '.join(sorted(SUFFIXES))}")
        (directory / name).write_bytes(store.get(key))
