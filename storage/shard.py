"""A shard: what one incarnation decoded between two flushes, as one Arrow IPC stream (docs/format.md section 4).

This module knows bytes and rows, not whose turn it was, nor which rows count: the claims decide that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.framing import decode_table, encode_table
from storage.store import CorruptObject

TokenIds = npt.NDArray[np.uint32]
Logprobs = npt.NDArray[np.float32]


class Finish(IntEnum):
    """The state of a response after a row's last token."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    RELEASED = 3  # handed over on purpose: any member may claim the response without waiting

    @property
    def ends_response(self) -> bool:
        return self in (Finish.STOP, Finish.LENGTH)


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one response, written under one claim.

    token_ids is uint32 [n], logprobs float32 [n]; `start` is the position of the first token, counted from the end of
    the prompt. n is 0 only for a row that carries nothing but its finish mark.
    """

    response: int
    epoch: int
    start: int
    token_ids: TokenIds
    logprobs: Logprobs
    weight_version: int
    finish: Finish


@cache
def schema() -> pa.Schema:
    """The columns of a shard, all without nulls, and its format version as metadata."""
    return pa.schema(
        [
            pa.field("response", pa.uint32(), nullable=False),
            pa.field("epoch", pa.uint32(), nullable=False),
            pa.field("start", pa.uint32(), nullable=False),
            pa.field("token_ids", pa.list_(pa.field("item", pa.uint32(), nullable=False)), nullable=False),
            pa.field("logprobs", pa.list_(pa.field("item", pa.float32(), nullable=False)), nullable=False),
            pa.field("weight_version", pa.uint32(), nullable=False),
            pa.field("finish", pa.uint8(), nullable=False),
        ],
        metadata={b"gleaner.shard": b"1"},
    )


def encode_shard(rows: Sequence[Row]) -> bytes:
    """The rows as one Arrow object; raises ValueError if a row's columns disagree."""
    for row in rows:
        if len(row.token_ids) != len(row.logprobs):
            raise ValueError(f"response {row.response}: {len(row.token_ids)} token ids, {len(row.logprobs)} logprobs")
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row.token_ids) for row in rows], out=offsets[1:])
    empty = [np.zeros(0, dtype=np.uint32)]
    tokens = np.concatenate([row.token_ids for row in rows] or empty).astype(np.uint32, copy=False)
    logprobs = np.concatenate([row.logprobs for row in rows] or empty).astype(np.float32, copy=False)
    fields = schema()
    columns = [
        pa.array([row.response for row in rows], type=pa.uint32()),
        pa.array([row.epoch for row in rows], type=pa.uint32()),
        pa.array([row.start for row in rows], type=pa.uint32()),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens), type=fields.field("token_ids").type),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(logprobs), type=fields.field("logprobs").type),
        pa.array([row.weight_version for row in rows], type=pa.uint32()),
        pa.array([int(row.finish) for row in rows], type=pa.uint8()),
    ]
    return encode_table(pa.Table.from_arrays(columns, schema=fields))


def decode_shard(key: str, body: bytes) -> list[Row]:
    """The rows of a shard in written order; raises CorruptObject, which names `key`, and never returns a part."""
    table = decode_table(key, body, schema())
    return [row for batch in table.to_batches() for row in _rows(key, batch)]


def _rows(key: str, batch: pa.RecordBatch) -> list[Row]:
    tokens, logprobs = batch.column("token_ids"), batch.column("logprobs")
    bounds = tokens.offsets.to_numpy()
    if not np.array_equal(bounds, logprobs.offsets.to_numpy()):
        raise CorruptObject(key, "token_ids and logprobs have different lengths")
    token_values = tokens.values.to_numpy(zero_copy_only=True)
    logprob_values = logprobs.values.to_numpy(zero_copy_only=True)
    columns = [batch.column(name).to_pylist() for name in ("response", "epoch", "start", "weight_version", "finish")]
    rows = []
    for index, (response, epoch, start, version, finish) in enumerate(zip(*columns, strict=True)):
        low, high = bounds[index], bounds[index + 1]
        if finish not in Finish._value2member_map_:
            raise CorruptObject(key, f"finish code {finish} of response {response} is not one of {list(Finish)}")
        rows.append(
            Row(response, epoch, start, token_values[low:high], logprob_values[low:high], version, Finish(finish)),
        )
    return rows
