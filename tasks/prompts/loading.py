"""Opens the prompts of a DataConfig and turns rows into prompts, with TRL's or verl's columns as they are.

In TRL's format, `prompt` holds text or messages, and other columns are free. In verl's, `reward_model.ground_truth` is
also offered as the column `ground_truth`, and `extra_info.index` is the id if it is unique.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from resources.regular_files import check_file
from storage.paths import expanded
from tasks.configuration.data import DataConfig
from tasks.configuration.older_form import ARITHMETIC, SIZE
from tasks.configuration.problems import names
from tasks.prompts.arithmetic import ArithmeticPrompts
from tasks.prompts.csv_rows import CsvRows
from tasks.prompts.examples import ExamplePrompts
from tasks.prompts.plain_values import check_text, plain
from tasks.prompts.prompt import Prompt, PromptError, PromptSet, check_prompt
from tasks.prompts.rows import DatasetRows, JsonLines, ParquetRows, Rows
from tasks.prompts.run_examples import RunExamples, holds_run_examples
from tasks.prompts.written_values import read_value

# SkyRL calls the same structure reward_spec.
TRUTH_COLUMNS = ("reward_model", "reward_spec")

# By the ending of a file's name.
_READERS: Mapping[str, Callable[[Path], Rows]] = {".csv": CsvRows, ".jsonl": JsonLines, ".parquet": ParquetRows}


class RowPrompts:
    """A PromptSet over the rows of a file; a row is converted to a prompt when it is requested."""

    def __init__(self, rows: Rows, config: DataConfig) -> None:
        """Check the prompt column and the ids; raises PromptError."""
        self._rows = rows
        self.doubts = rows.doubts if isinstance(rows, CsvRows) else ()
        self._prompt_column = config.prompt_column
        self._size = len(rows) if config.limit is None else min(config.limit, len(rows))
        if self._size == 0:
            raise PromptError(f"source: {config.source} has no rows")
        _check_column(rows, config.prompt_column, "prompt_column")
        self._ids = _row_ids(rows, self._size)
        common = rows.columns - {config.prompt_column}
        extra = {"ground_truth"} & self[0].columns.keys()
        self.columns: frozenset[str] = frozenset(common | extra)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._size:
            raise IndexError(f"prompt {index} of {self._size}")
        where = self._rows.place(index)
        try:
            row = {check_text(name, "a column"): plain(value, name) for name, value in self._rows.row(index).items()}
        except (TypeError, ValueError) as error:
            raise PromptError(f"{where}: {error}") from None
        content = check_prompt(row.pop(self._prompt_column), where)
        return Prompt(self._ids[index], content, _with_ground_truth(row), where)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(self._size))

    def place(self, index: int) -> str:
        """The file and line or row of a prompt, for messages."""
        return self._rows.place(index)


def load_prompts(config: DataConfig, *, check_rows: bool = True, section: str = "data", kind: str = "rl") -> PromptSet:
    """Open the prompts of `config`. PromptError says what is wrong and where.

    `check_rows` converts every row once, so that a wrong row is found before the run begins; a process may skip the
    check if an earlier process has made the check. section: the section of the configuration, for messages. kind: the
    `algorithm.kind`; unless "rl", the rows have completions, and the result is `ExamplePrompts`, or `RunExamples`.
    """
    try:
        if kind != "rl" and holds_run_examples(config.source):
            return RunExamples(Path(config.source))
        prompts = _loaded(config, check_rows=check_rows)
        return prompts if kind == "rl" else _examples(prompts, config, kind, check_rows=check_rows)
    except PromptError as error:
        is_of_field = str(error).partition(":")[0] in names(DataConfig)
        raise PromptError(f"{section}.{error}" if is_of_field else str(error)) from error


def _examples(prompts: PromptSet, config: DataConfig, kind: str, *, check_rows: bool) -> PromptSet:
    found = ExamplePrompts(prompts, config, kind)
    for _ in found if check_rows else ():
        pass  # each row is converted
    return found


def _loaded(config: DataConfig, *, check_rows: bool) -> PromptSet:
    if config.source == ARITHMETIC:
        return ArithmeticPrompts(config.limit or SIZE, config.seed, config.arithmetic)
    prompts = RowPrompts(_open_rows(config), config)
    if check_rows:
        for number, prompt in enumerate(prompts):
            missing = prompts.columns - prompt.columns.keys()
            if "json_as_text" not in config.allow:
                _check_nested_truth(prompt, prompts.place(number))
            if missing:
                raise PromptError(
                    f"source: prompt {prompt.id!r} of {config.source} has no {', '.join(sorted(missing))}"
                )
    return prompts


def doubts_of(prompts: PromptSet, section: str = "data") -> list[str]:
    """Doubts about the reading of a file of prompts; each line begins with a field of the section."""
    return [f"{section}.{doubt}" for doubt in getattr(prompts, "doubts", ())]


def _open_rows(config: DataConfig) -> Rows:
    try:
        path = expanded(config.source)
        exists = path.exists()
    except (OSError, ValueError) as error:  # such as a path that is too long
        raise PromptError(f"source: value {config.source[:80]!r} cannot be opened: {error}"[:300]) from None
    if not exists:
        raise PromptError(
            f"source: value {config.source!r}; allowed: {ARITHMETIC!r}, or an existing {', '.join(_READERS)} file, "
            f"or a directory written by datasets.save_to_disk"
        )
    if path.is_dir():
        return DatasetRows(path, config.split)
    try:
        check_file(path)
    except OSError as error:
        raise PromptError(f"source: value {config.source!r}: {error.strerror}") from None
    if config.split is not None:
        raise PromptError(f"split: value {config.split!r}; allowed: null, because {path} is a file")
    if path.suffix in _READERS:
        return _READERS[path.suffix](path)
    raise PromptError(f"source: {path} ends in {path.suffix!r}; allowed: {', '.join(_READERS)}, or a directory")


def _check_column(rows: Rows, column: str, field_name: str) -> None:
    if column in rows.columns:
        return
    for index in range(len(rows)):
        row = rows.row(index)
        if column not in row:
            there = ", ".join(map(repr, sorted(row)))
            raise PromptError(f"{field_name}: {rows.place(index)} has no column {column!r}; there are: {there}")


def _row_ids(rows: Rows, size: int) -> Sequence[str]:
    """Verl's extra_info.index where unique, else the row number."""
    if "extra_info" in rows.columns:
        indices = [
            info.get("index") if isinstance(info, Mapping) else None for info in rows.values("extra_info")[:size]
        ]
        ids = [str(index) for index in indices if _is_id(index)]
        if len(set(ids)) == size:
            return ids
    return [str(index) for index in range(size)]


def _is_id(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, str) and value != "")


def _check_nested_truth(prompt: Prompt, where: str) -> None:
    """Raise PromptError if the object with the ground truth is text, because rewards would miss the ground truth."""
    for name in TRUTH_COLUMNS:
        value = prompt.columns.get(name)
        if isinstance(value, str) and isinstance(read_value(value), Mapping):
            raise PromptError(
                f"source: {where}: the column {name} is text that holds an object; allowed: an object "
                "(json.loads of the text), or data.allow: [json_as_text]"
            )


def _with_ground_truth(columns: dict[str, Any]) -> dict[str, Any]:
    """Add verl's nested ground truth as the column ground_truth, which verl's reward functions read."""
    if "ground_truth" not in columns:
        for name in TRUTH_COLUMNS:
            nested = columns.get(name)
            if isinstance(nested, dict) and "ground_truth" in nested:
                return {**columns, "ground_truth": nested["ground_truth"]}
    return columns
