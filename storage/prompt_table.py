"""The prompts of an iteration as one Arrow object: what was asked, as tokens and as text, and what rewards need.

Content-named and written before the plan that names it, so a plan never points at half a table.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa

from storage.store import CorruptObject
from storage.trailer import append_trailer, strip_trailer

SCHEMA_VERSION = b"1"
VERSION_KEY = b"gleaner.prompts"


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt: group g of an iteration is row g of its table.

    `prompt` is the text or the chat messages, `columns` whatever else its dataset holds (JSON values).
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]


@cache
def schema() -> pa.Schema:
    names = ["prompt_id", "token_ids", "prompt", "columns"]
    types = [pa.string(), pa.list_(pa.uint32()), pa.string(), pa.string()]
    fields = [pa.field(name, kind, nullable=False) for name, kind in zip(names, types, strict=True)]
    return pa.schema(fields, metadata={VERSION_KEY: SCHEMA_VERSION})


def encode_prompts(rows: Sequence[PromptRow]) -> bytes:
    """An Arrow IPC stream (zstd) and its trailer; prompt and columns travel as JSON text."""
    table = pa.Table.from_pydict(
        {
            "prompt_id": [row.prompt_id for row in rows],
            "token_ids": [list(row.token_ids) for row in rows],
            "prompt": [json.dumps(row.prompt, ensure_ascii=False) for row in rows],
            "columns": [json.dumps(row.columns, ensure_ascii=False, sort_keys=True) for row in rows],
        },
        schema=schema(),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema(), options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return append_trailer(sink.getvalue().to_pybytes())


def decode_prompts(key: str, body: bytes) -> list[PromptRow]:
    """The prompts in group order; raises CorruptObject."""
    stream = strip_trailer(key, body)
    try:
        with pa.ipc.open_stream(pa.py_buffer(stream)) as reader:
            version = (reader.schema.metadata or {}).get(VERSION_KEY)
            if version != SCHEMA_VERSION or not reader.schema.equals(schema()):
                raise CorruptObject(key, f"not a prompt table of version {SCHEMA_VERSION!r} (found {version!r})")
            columns = reader.read_all().to_pydict()
    except pa.ArrowInvalid as error:
        raise CorruptObject(key, f"not an Arrow stream: {error}") from None
    return [
        PromptRow(prompt_id, tuple(token_ids), json.loads(prompt), json.loads(extra))
        for prompt_id, token_ids, prompt, extra in zip(*(columns[name] for name in schema().names), strict=True)
    ]
