"""Readers of files of rows: JSON lines, Parquet, and datasets written by datasets.save_to_disk; `csv_rows` has CSV.

A row is a mapping from columns to values of the format's types. The readers do not know the prompt's column.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from resources.regular_files import check_files, read_file
from storage.stores.shortage import raise_shortage
from tasks.prompts.prompt import PromptError


class Rows(Protocol):
    """Rows in file order, fetched one by one."""

    @property
    def columns(self) -> frozenset[str]:
        """The columns that every row has."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Mapping[str, Any]: ...

    def values(self, column: str) -> list[Any]:
        """One column of all rows; `column` is one of `columns`."""
        ...

    def place(self, index: int) -> str:
        """The file and line or row of `index`, for messages."""
        ...


class JsonLines:
    """A file with one JSON object per line, in UTF-8, held in memory; empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._lines: list[int] = []
        try:
            body = read_file(path)
        except OSError as error:
            raise PromptError(f"{path} cannot be read: {error.strerror}") from None
        for number, line in enumerate(body.split(b"\n"), start=1):
            if line.strip():
                self._rows.append(_parse_line(line, f"{path}: line {number}"))
                self._lines.append(number)
        self.columns = frozenset.intersection(*(frozenset(row) for row in self._rows)) if self._rows else frozenset()

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]

    def values(self, column: str) -> list[Any]:
        return [row[column] for row in self._rows]

    def place(self, index: int) -> str:
        return f"{self._path}: line {self._lines[index]}"


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_distinct)
    except _KeyTwiceError as error:
        raise PromptError(
            f"{where}: the key {error.args[0][:80]!r} is there twice; allowed: once in an object"
        ) from None
    except ValueError as error:
        raise PromptError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise PromptError(f"{where} is nested too deep") from None
    if not isinstance(value, dict):
        raise PromptError(f"{where} is {type(value).__name__}; allowed: a JSON object")
    return value


class _KeyTwiceError(Exception):
    """An object of JSON with two values for the key in its arguments; readers take the first, the last, or both."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _KeyTwiceError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return found


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Turn the errors of values that Python cannot hold, such as a timestamp beyond year 9999, into PromptError."""
    try:
        yield
    except (ValueError, OverflowError, pa.ArrowException) as error:
        raise_shortage(error)
        raise PromptError(f"{where} holds a value that cannot be read: {' '.join(str(error).split())[:300]}") from None


class ParquetRows:
    """A memory-mapped Parquet file; a row is converted when it is requested."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._table = pq.read_table(path, memory_map=True)
        except (pa.ArrowException, OSError) as error:
            raise_shortage(error)
            raise PromptError(f"{path} is not a readable Parquet file: {error}") from None
        self.columns = frozenset(self._table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Mapping[str, Any]:
        with _readable(self.place(index)):
            row: Mapping[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row

    def values(self, column: str) -> list[Any]:
        with _readable(f"{self._path}: column {column!r}"):
            values: list[Any] = self._table.column(column).to_pylist()
        return values

    def place(self, index: int) -> str:
        return f"{self._path}: row {index}"


class DatasetRows:
    """A Hugging Face dataset on disk, or one split of a DatasetDict."""

    def __init__(self, path: Path, split: str | None) -> None:
        self._path = path
        # Imported here, because it takes seconds and only this source needs it.
        import datasets  # noqa: PLC0415

        try:
            check_files(path)
            for split_of_it in filter(Path.is_dir, path.iterdir()):
                check_files(split_of_it)
            loaded = datasets.load_from_disk(str(path))
        except IndexError:  # what datasets raises for a dataset without any record batch
            raise PromptError(f"source: {path} has no rows") from None
        except Exception as error:  # noqa: BLE001 - a damaged file can raise anything in the library that reads it
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise PromptError(f"{path} is not a directory written by datasets.save_to_disk: {reason}") from None
        if isinstance(loaded, datasets.DatasetDict):
            if split not in loaded:
                raise PromptError(f"split: value {split!r}; allowed: {', '.join(map(repr, loaded))} (splits of {path})")
            loaded = loaded[split]
        elif split is not None and split != str(loaded.split):
            raise PromptError(f"split: value {split!r}; allowed: null, because {path} is a single data set")
        self._dataset = loaded.with_format(None)
        self.columns = frozenset(self._dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Mapping[str, Any]:
        with _readable(self.place(index)):
            row: Mapping[str, Any] = self._dataset[index]
        return row

    def values(self, column: str) -> list[Any]:
        with _readable(f"{self._path}: column {column!r}"):
            return list(self._dataset[column])

    def place(self, index: int) -> str:
        return f"{self._path}: row {index}"
