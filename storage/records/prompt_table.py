"""The prompts of an iteration as one Arrow object: each as tokens and as text, with the columns that rewards need.

The object is named by content and written ahead of its plan, so a plan never points at half a table.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa

from storage.digests import digest_of
from storage.records import layout
from storage.records.framing import decode_table, encode_table
from storage.records.records import PlanRecord
from storage.stores.store import CorruptObject, ObjectStore


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt: group g of an iteration is row g of its table.

    Attributes:
        token_ids: the prompt's tokens.
        prompt: the text or the chat messages.
        columns: the other columns of the dataset (JSON values).
        opening: text that an environment's `reset` returned for the group; it ends the user's last message in `prompt`.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    opening: str | None = None


@cache
def schema() -> pa.Schema:
    """The columns of the table, without nulls except in `opening`, and its format version as metadata."""
    names = ["prompt_id", "token_ids", "prompt", "columns"]
    types = [pa.string(), pa.list_(pa.uint32()), pa.string(), pa.string()]
    fields = [pa.field(name, kind, nullable=False) for name, kind in zip(names, types, strict=True)]
    return pa.schema([*fields, pa.field("opening", pa.string())], metadata={b"gleaner.prompts": b"1"})


def encode_prompts(rows: Sequence[PromptRow]) -> bytes:
    """The prompts as one Arrow object; prompt and columns are stored as JSON text."""
    table = pa.Table.from_pydict(
        {
            "prompt_id": [row.prompt_id for row in rows],
            "token_ids": [list(row.token_ids) for row in rows],
            "prompt": [json.dumps(row.prompt, ensure_ascii=False) for row in rows],
            "columns": [json.dumps(row.columns, ensure_ascii=False, sort_keys=True) for row in rows],
            "opening": [row.opening for row in rows],
        },
        schema=schema(),
    )
    return encode_table(table)


def read_prompts(store: ObjectStore, plan: PlanRecord) -> list[PromptRow]:
    """The prompts of a plan, in group order.

    Raises CorruptObject, which names the table, if its bytes do not have the digest in the name that the plan states.
    """
    body = store.get(plan.prompts_key)
    if layout.prompts(plan.iteration, digest_of(body)) != plan.prompts_key:
        raise CorruptObject(plan.prompts_key, "its bytes do not have the digest in its name")
    return decode_prompts(plan.prompts_key, body)


def decode_prompts(key: str, body: bytes) -> list[PromptRow]:
    """The prompts in group order; raises CorruptObject."""
    table = decode_table(key, body, schema()).to_pydict()
    rows = zip(*(table[name] for name in schema().names), strict=True)
    try:
        return [
            PromptRow(prompt_id, tuple(token_ids), json.loads(prompt), json.loads(extra), opening)
            for prompt_id, token_ids, prompt, extra, opening in rows
        ]
    except (ValueError, RecursionError) as error:
        raise CorruptObject(key, f"a prompt or its columns are no JSON: {error}") from None
