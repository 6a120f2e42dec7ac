"""Rows of a CSV file, with the values that `datasets` would read, as for a data set of the hub.

`datasets` guesses the types of columns, fills up short rows with null, and takes the first column of long rows for an
index. Short and long rows are mistakes of a file, so Python's own reader counts the fields here first.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from resources.regular_files import read_file
from storage.stores.shortage import raise_shortage
from tasks.prompts.prompt import PromptError

_SHOWN_CHARACTERS_MAX = 80
# A prompt may be longer than Python's reader takes by default.
_FIELD_CHARACTERS_MAX = 1 << 30


class CsvRows:
    """A file of records with a header, separated by commas, in UTF-8, held in memory; empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        """Raises PromptError for a file that is damaged, or whose records do not fit its header."""
        self._path = path
        header, records, self._lines = _records(path)
        self._columns = _typed(path) if records else {name: [] for name in header}
        if list(self._columns) != header or any(len(values) != len(records) for values in self._columns.values()):
            raise PromptError(f"{path} is read in two ways; write it as JSON lines")
        self.columns = frozenset(header)
        self.doubts = tuple(
            doubt
            for place, name in enumerate(header)
            if (doubt := self._changed(name, [record[place] for record in records])) is not None
        )

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> Mapping[str, Any]:
        return {name: values[index] for name, values in self._columns.items()}

    def values(self, column: str) -> list[Any]:
        return self._columns[column]

    def place(self, index: int) -> str:
        return f"{self._path}: line {self._lines[index]}"

    def _changed(self, name: str, written: Sequence[str]) -> str | None:
        """A doubt about a column with fields that `datasets` changes, such as 007 to 7; None without such a field."""
        values = self._columns[name]
        changed = [index for index, text in enumerate(written) if not _says(values[index], text)]
        if not changed:
            return None
        first = changed[0]
        count = f"{len(changed):,} field{'s' * (len(changed) != 1)}"
        verb = "are" if len(changed) != 1 else "is"
        return (
            f"source: {count} of column {name!r} {verb} read otherwise than they are written, as `datasets` does; "
            f"{self.place(first)} has {_shown(written[first])!r}, which is read as {values[first]!r}; allowed: JSON "
            "lines, which say of each value what it is"
        )


def _says(value: Any, text: str) -> bool:
    if value is None:
        return not text
    return text == value or text.strip() == str(value)


def _records(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """The header, the records, and the line in which each begins; raises PromptError."""
    header: list[str] | None = None
    records: list[list[str]] = []
    lines: list[int] = []
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    with _long_fields():
        begins = 1
        try:
            for record in reader:
                if header is None and record:
                    header = _checked_header(record, path)
                elif header is not None and record:
                    if len(record) != len(header):
                        raise PromptError(
                            f"{path}: line {begins} has {len(record)} fields; allowed: {len(header)}, as the header has"
                        )
                    records.append(record)
                    lines.append(begins)
                begins = reader.line_num + 1
        except csv.Error as error:
            raise PromptError(f"{path}: line {begins} is not CSV: {error}") from None
    return header or [], records, lines


def _text(path: Path) -> str:
    try:
        body = read_file(path)
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise PromptError(f"{path}: line {line}: byte 0x{body[error.start]:02x} is not UTF-8") from None


def _checked_header(names: list[str], path: Path) -> list[str]:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise PromptError(f"{path}: the column {name!r} is there twice; allowed: each name once")
    # pandas writes its index so.
    return [name or f"Unnamed: {place}" for place, name in enumerate(names)]


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let Python's reader take long fields within the block; the limit is a setting of the process."""
    before = csv.field_size_limit(_FIELD_CHARACTERS_MAX)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _typed(path: Path) -> dict[str, list[Any]]:
    """The columns in the order of the file, with the values of `datasets`; raises PromptError."""
    # Imported here, because it takes seconds and only this source needs it.
    import pandas as pd  # noqa: PLC0415
    from datasets.packaged_modules.csv.csv import CsvConfig  # noqa: PLC0415

    # What the library's own reader does. That one leaves a copy in its cache, and the file open after an error.
    try:
        with pd.read_csv(path, iterator=True, **CsvConfig().pd_read_csv_kwargs) as pieces:
            tables = [pa.Table.from_pandas(piece) for piece in pieces]
        whole = pa.concat_tables([table.cast(tables[0].schema) for table in tables])
    except (ValueError, OSError, pa.ArrowException) as error:
        raise_shortage(error)
        raise PromptError(f"{path} cannot be read as CSV: {_shown(f'{type(error).__name__}: {error}')}") from None
    return {name: whole.column(name).to_pylist() for name in whole.column_names}


def _shown(text: str) -> str:
    short = " ".join(text.split())
    return short if len(short) <= _SHOWN_CHARACTERS_MAX else short[:_SHOWN_CHARACTERS_MAX] + "..."
