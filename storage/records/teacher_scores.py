"""A teacher's scores of the responses in a micro-batch, as one Arrow object, stored before a step reads them.

The first object that is stored decides the scores. Every later attempt, and every replay, reads the stored bits and
asks no teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.records.framing import decode_table, encode_table
from storage.stores.store import CorruptObject


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """The scores of the tokens that the policy sampled in a response, observations left out.

    Attributes:
        response: The number of the response.
        teacher: The name of the teacher.
        logprobs: float32 [tokens], of the sampled tokens.
        agrees: bool [tokens], whether the sampled token is the teacher's most likely token.
        head_ids: uint32 [tokens, K], the teacher's most likely tokens, the likeliest first.
        head_logprobs: float32 [tokens, K], of `head_ids`.
    """

    response: int
    teacher: str
    logprobs: npt.NDArray[np.float32]
    agrees: npt.NDArray[np.bool_]
    head_ids: npt.NDArray[np.uint32]
    head_logprobs: npt.NDArray[np.float32]


@cache
def schema() -> pa.Schema:
    """The columns of the table, without nulls, and its format version as metadata; heads are flat lists."""
    kinds = {
        "response": pa.uint32(),
        "teacher": pa.string(),
        "logprobs": pa.list_(pa.float32()),
        "agrees": pa.list_(pa.bool_()),
        "head_ids": pa.list_(pa.uint32()),
        "head_logprobs": pa.list_(pa.float32()),
    }
    fields = [pa.field(name, kind, nullable=False) for name, kind in kinds.items()]
    return pa.schema(fields, metadata={b"gleaner.teacher_scores": b"1"})


def encode_scores(rows: Sequence[ScoredResponse]) -> bytes:
    """The scores as one Arrow object."""
    columns = {
        "response": [row.response for row in rows],
        "teacher": [row.teacher for row in rows],
        **{
            name: [getattr(row, name).reshape(-1) for row in rows]
            for name in ("logprobs", "agrees", "head_ids", "head_logprobs")
        },
    }
    return encode_table(pa.Table.from_pydict(columns, schema=schema()))


def decode_scores(key: str, body: bytes) -> list[ScoredResponse]:
    """The scores in the order in which they were given; raises CorruptObject, which names `key`."""
    table = decode_table(key, body, schema())
    rows = []
    for response, teacher, *lists in zip(*(table[name] for name in schema().names), strict=True):
        logprobs, agrees, ids, head = (each.values.to_numpy(zero_copy_only=False) for each in lists)
        tokens = len(logprobs)
        fits = tokens == len(agrees) > 0 and len(ids) == len(head) and not len(ids) % tokens
        if not fits or not np.isfinite(logprobs).all() or not np.isfinite(head).all():
            raise CorruptObject(key, f"response {response}: its lists do not fit each other, or are not finite")
        shape = (tokens, len(ids) // tokens)
        rows.append(
            ScoredResponse(response.as_py(), teacher.as_py(), logprobs, agrees, ids.reshape(shape), head.reshape(shape))
        )
    return rows
