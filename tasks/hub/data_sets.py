"""Reads one split of a data set on the hub as Parquet files, at one commit, with `datasets`."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.hub.repositories import HubError, bars_only_on_a_terminal, explained, one_line

PIECE_BYTES = 64 << 20
# Where `datasets` puts the first fields of CSV records with one more than the header; all others move one to the left.
_INDEX = "__index_level_0__"
# What `datasets` reads without any code of the repository, and what it has prepared before.
_TABLES = ("arrow", "cache", "csv", "json", "parquet", "text")


def parquet_pieces(repo: str, commit: str, subset: str | None, split: str | None, section: str) -> list[bytes]:
    """The rows of a split as Parquet files of about PIECE_BYTES each, in order.

    Without the network, rows come from the data that `datasets` has prepared at this commit, or else from the cache of
    huggingface_hub.

    Args:
        repo: The id of the data set.
        commit: The commit, as 40 hexadecimal digits.
        subset: The name of the subset; None for the default.
        split: The name of the split; None for a data set with a single split.
        section: The section of the configuration, for messages.

    Raises:
        HubError: The data set or the split cannot be read.
    """
    rows = _rows(repo, commit, subset, split, section)
    table = rows.with_format("arrow")
    if not len(rows):
        raise HubError(f"{section}.source: value {repo!r} has no rows in split {split!r}")
    pieces, whole = [], table[:]
    count = max(1, -(-whole.nbytes // PIECE_BYTES))
    step = -(-len(rows) // count)
    for start in range(0, len(rows), step):
        written = io.BytesIO()
        # The metadata say how `datasets` saw the columns, and differ between its versions.
        pq.write_table(whole.slice(start, step).replace_schema_metadata(None), written)
        pieces.append(written.getvalue())
    return pieces


def join_pieces(pieces: list[bytes], file: Path) -> None:
    """Write the rows of all pieces to a single Parquet file, and create the file's directories."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.concat_tables([pq.read_table(pa.BufferReader(piece)) for piece in pieces]), file)


def _rows(repo: str, commit: str, subset: str | None, split: str | None, section: str) -> Any:
    import datasets  # noqa: PLC0415 - costs seconds
    import huggingface_hub  # noqa: PLC0415

    for library in (datasets, huggingface_hub):
        bars_only_on_a_terminal(library.utils)
    builder = _builder(repo, commit, subset, section)
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in _TABLES:
        raise HubError(f"{section}.source: value {repo!r} holds files of kind {kind!r}; allowed: {', '.join(_TABLES)}")
    try:
        builder.download_and_prepare()
        splits = list(builder.info.splits or ())
    except Exception as error:  # a damaged file can raise anything in the library that reads it
        raise HubError(f"{section}.source: value {repo!r} cannot be read: {one_line(error)}") from error
    if split is None and len(splits) == 1:
        split = splits[0]
    if split not in splits:
        allowed = ", ".join(map(repr, splits))
        raise HubError(f"{section}.split: value {split!r}; allowed: {allowed} (splits of {repo})")
    loaded: datasets.Dataset = builder.as_dataset(split=split)
    if kind == "csv" and _INDEX in loaded.column_names:
        raise HubError(f"{section}.source: value {repo!r} has records with more fields than the header of its CSV file")
    return loaded


def _builder(repo: str, commit: str, subset: str | None, section: str) -> Any:
    """A builder of exactly this commit; raises HubError."""
    import datasets  # noqa: PLC0415
    import huggingface_hub  # noqa: PLC0415

    field, error = f"{section}.source", None
    where = f"{field}: value {repo!r} with subset {subset!r}"
    try:
        builder = datasets.load_dataset_builder(repo, name=subset, revision=commit)
        # Without the network, `datasets` takes the newest version that it has prepared, whichever that is.
        if Path(builder.cache_dir).name == commit:
            _check_places(builder, f"hf://datasets/{repo}@{commit}/", field)
            return builder
    except HubError:
        raise
    except Exception as raised:  # noqa: BLE001 - anything that the repository's card makes of it
        error = raised
    with explained("dataset", repo, commit, field):
        if isinstance(error, ValueError) and not isinstance(error, OSError):
            raise HubError(f"{where}: {one_line(error)}")
        folder = huggingface_hub.snapshot_download(repo, repo_type="dataset", revision=commit, local_files_only=True)
    try:
        builder = datasets.load_dataset_builder(folder, name=subset)
    except Exception as raised:  # noqa: BLE001
        raise HubError(f"{where}: {one_line(raised)}") from None
    _check_places(builder, f"{folder}/", field)
    return builder


def _check_places(builder: Any, prefix: str, field: str) -> None:
    """Raise HubError if the repository's card names a file outside of the repository."""
    for files in (builder.config.data_files or {}).values():
        for file in files:
            if not str(file).startswith(prefix) or ".." in str(file).split("/"):
                raise HubError(f"{field}: the data set names {str(file)[:120]!r}, which is not one of its own files")
