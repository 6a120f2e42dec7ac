"""Responses of other runs as examples: a Parquet file with the tokens of prompts and responses, as sampled."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.prompts.examples import Stretch
from tasks.prompts.prompt import Message, Prompt, PromptError

_IDS = pa.list_(pa.uint32())
_MARK = b"gleaner.run_examples"
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("token_ids", _IDS),
        ("prompt", pa.string()),
        ("columns", pa.string()),
        ("responses", pa.list_(_IDS)),
        ("origins", pa.list_(_IDS)),
    ],
    metadata={_MARK: b"1"},
)


@dataclass(frozen=True, slots=True)
class RunExample:
    """A prompt of another run with one response, or a pair of which the first is the better one.

    Attributes:
        id: Unique in a file.
        token_ids: The prompt's tokens.
        prompt: The text or the chat messages.
        columns: The other columns of the prompt's row.
        responses: The tokens of each response.
        origins: For each response, the lengths of stretches by the policy, an observation, the policy, and so on.
    """

    id: str
    token_ids: Sequence[int]
    prompt: str | list[Message]
    columns: dict[str, Any]
    responses: Sequence[Sequence[int]]
    origins: Sequence[Sequence[int]]


def encode(examples: Sequence[RunExample]) -> bytes:
    """The bytes of a Parquet file; equal for equal examples."""
    rows = [
        {name: getattr(each, name) for name in ("id", "token_ids", "responses", "origins")}
        | {name: json.dumps(getattr(each, name), sort_keys=True) for name in ("prompt", "columns")}
        for each in examples
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), sink, compression="zstd")
    body: bytes = sink.getvalue().to_pybytes()
    return body


def holds_run_examples(source: str) -> bool:
    """Whether a source of prompts is a file of `encode`."""
    if not source.endswith(".parquet") or not Path(source).is_file():
        return False
    try:
        return _MARK in (pq.read_schema(source).metadata or {})
    except (OSError, pa.ArrowException):
        return False


class RunExamples:
    """A PromptSet of the examples in a file of `encode`, with their responses."""

    def __init__(self, file: Path, rows: Sequence[int] | None = None) -> None:
        """rows: the places of the examples in the file; None: all."""
        self._file, whole = file, pq.read_table(file)
        self._table = whole if rows is None else whole.take(list(rows))
        shared = set.intersection(*(set(json.loads(each.as_py())) for each in self._table["columns"]))
        self.columns: frozenset[str] = frozenset(shared)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        row = {name: self._table[name][index].as_py() for name in ("id", "prompt", "columns", "token_ids")}
        asked, columns = json.loads(row["prompt"]), json.loads(row["columns"])
        return Prompt(row["id"], asked, columns, self.place(index), tuple(row["token_ids"]))

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))

    def place(self, index: int) -> str:
        """The response of another run, for messages."""
        return f"data.runs, response {self._table['id'][index].as_py()}"

    def kept(self, rows: Sequence[int]) -> "RunExamples":
        """Some of the examples, in order, with their responses."""
        return RunExamples(self._file, rows)

    def completions(self, prompt_id: str, length_max: int) -> list[tuple[Stretch, ...]]:
        """The responses to a prompt, by stretches, of which the first and the last are learned.

        Observations behind the policy's last token are left out. Raises PromptError for a response of more than
        `length_max` tokens (sampling.max_completion_length).
        """
        place = self._places[prompt_id]
        tokens, origins = (self._table[name][place].as_py() for name in ("responses", "origins"))
        found = [_stretches(*each) for each in zip(tokens, origins, strict=True)]
        for stretches in found:
            length = sum(len(stretch.token_ids) for stretch in stretches)
            if length > length_max:
                raise PromptError(
                    f"{self.place(place)} has {length} tokens; allowed: {length_max} (sampling.max_completion_length). "
                    "Raise sampling.max_completion_length, or set data.select.max_length"
                )
        return found

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self._table["id"].to_pylist())}


def _stretches(tokens: Sequence[int], origins: Sequence[int]) -> tuple[Stretch, ...]:
    found, start = [], 0
    # Stretches of the policy have even places.
    for number, length in enumerate(origins if len(origins) % 2 else origins[:-1]):
        found.append(Stretch(tuple(tokens[start : start + length]), is_learned=number % 2 == 0))
        start += length
    return tuple(found)
