"""A shard: the rows that one incarnation decoded between two flushes, as an Arrow IPC stream (docs/format.md 4).

This module knows bytes and rows. The claims decide whose turn it was and whether a row counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.records.framing import decode_table, encode_table
from storage.stores.store import CorruptObject

EVENT_BYTES_MAX = 1 << 20
TokenIds = npt.NDArray[np.uint32]
Logprobs = npt.NDArray[np.float32]


class Finish(IntEnum):
    """The state of a response after a row's last token."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    RELEASED = 3  # handed over on purpose: any member may claim the response without waiting
    ACTING = 4  # the policy ended its turn with calls; the environment owes an answer
    FAILED = 5  # the environment is lost for good: the response ends, and it is not trained
    AGAIN = 6  # the environment cannot be rebuilt: the response begins again, and no row up to this one counts

    @property
    def ends_response(self) -> bool:
        return self in (Finish.STOP, Finish.LENGTH, Finish.FAILED)


class Origin(IntEnum):
    """Where the tokens of a row come from."""

    POLICY = 0
    OBSERVATION = 1  # an environment's answer: read by the policy, not sampled from it


E = TypeVar("E", bound=IntEnum)
_FINISHES = {int(finish): finish for finish in Finish}
_ORIGINS = {int(origin): origin for origin in Origin}


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of a response, written under one claim.

    Attributes:
        start: position of the first token, counted from the end of the prompt.
        token_ids: uint32 [n]; n is 0 only for a row that carries nothing but its finish mark or event.
        logprobs: float32 [n], or [0] for an observation.
        event: JSON of one turn of a conversation with an environment, at most EVENT_BYTES_MAX; on rows of observations
            only.
    """

    response: int
    epoch: int
    start: int
    token_ids: TokenIds
    logprobs: Logprobs
    weight_version: int
    finish: Finish
    origin: Origin = Origin.POLICY
    event: bytes | None = None

    def lack(self) -> str | None:
        """Why the row may not be stored or used; None if nothing is wrong."""
        policy = self.origin is Origin.POLICY
        if (
            policy
            and self.finish is Finish.RUNNING
            and self.event is None
            and len(self.logprobs) == len(self.token_ids)
        ):
            # Nearly every row; a reader of many members asks this for each.
            return None
        if len(self.logprobs) != (len(self.token_ids) if policy else 0):
            kind = self.origin.name.lower()
            return f"response {self.response}: {len(self.token_ids)} token ids, {len(self.logprobs)} logprobs ({kind})"
        if lack := self._finish_lack():
            return lack
        if self.event is not None and policy:
            return f"response {self.response}: an event in a row of the policy; allowed: in rows of observations"
        if self.event is not None and len(self.event) > EVENT_BYTES_MAX:
            return f"response {self.response}: an event of {len(self.event)} bytes; allowed: {EVENT_BYTES_MAX}"
        return None

    def _finish_lack(self) -> str | None:
        """Why the finish does not fit the origin and the tokens."""
        name, what = f"response {self.response}", self.finish.name.lower()
        if self.origin is Origin.POLICY and self.finish in (Finish.FAILED, Finish.AGAIN):
            return f"{name}: {what} in a row of the policy; allowed: in rows of observations"
        if self.origin is Origin.OBSERVATION and self.finish in (Finish.ACTING, Finish.RELEASED):
            return f"{name}: {what} in an observation; allowed: in rows of the policy"
        if self.finish is Finish.AGAIN and len(self.token_ids):
            return f"{name}: it begins again with {len(self.token_ids)} token ids; allowed: none"
        return None


@cache
def schema() -> pa.Schema:
    """The columns of a shard, without nulls except in `event`, and its format version as metadata."""
    return pa.schema(
        [
            pa.field("response", pa.uint32(), nullable=False),
            pa.field("epoch", pa.uint32(), nullable=False),
            pa.field("start", pa.uint32(), nullable=False),
            pa.field("token_ids", pa.list_(pa.field("item", pa.uint32(), nullable=False)), nullable=False),
            pa.field("logprobs", pa.list_(pa.field("item", pa.float32(), nullable=False)), nullable=False),
            pa.field("weight_version", pa.uint32(), nullable=False),
            pa.field("finish", pa.uint8(), nullable=False),
            pa.field("origin", pa.uint8(), nullable=False),
            pa.field("event", pa.binary()),
        ],
        metadata={b"gleaner.shard": b"1"},
    )


def encode_shard(rows: Sequence[Row]) -> bytes:
    """The rows as one Arrow object; raises ValueError if a row's columns disagree."""
    for row in rows:
        if lack := row.lack():
            raise ValueError(lack)
    token_offsets, logprob_offsets = (
        np.cumsum([0, *map(len, lists)], dtype=np.int32)
        for lists in ([row.token_ids for row in rows], [row.logprobs for row in rows])
    )
    empty = [np.zeros(0, dtype=np.uint32)]
    tokens = np.concatenate([row.token_ids for row in rows] or empty).astype(np.uint32, copy=False)
    logprobs = np.concatenate([row.logprobs for row in rows] or empty).astype(np.float32, copy=False)
    fields = schema()
    columns = [
        pa.array([row.response for row in rows], type=pa.uint32()),
        pa.array([row.epoch for row in rows], type=pa.uint32()),
        pa.array([row.start for row in rows], type=pa.uint32()),
        pa.ListArray.from_arrays(pa.array(token_offsets), pa.array(tokens), type=fields.field("token_ids").type),
        pa.ListArray.from_arrays(pa.array(logprob_offsets), pa.array(logprobs), type=fields.field("logprobs").type),
        pa.array([row.weight_version for row in rows], type=pa.uint32()),
        pa.array([int(row.finish) for row in rows], type=pa.uint8()),
        pa.array([int(row.origin) for row in rows], type=pa.uint8()),
        pa.array([row.event for row in rows], type=pa.binary()),
    ]
    return encode_table(pa.Table.from_arrays(columns, schema=fields))


def decode_shard(key: str, body: bytes) -> list[Row]:
    """The rows of a shard in written order; raises CorruptObject, which names `key`, and never returns a part."""
    table = decode_table(key, body, schema())
    return [row for batch in table.to_batches() for row in _rows(key, batch)]


def _rows(key: str, batch: pa.RecordBatch) -> list[Row]:
    tokens, logprobs = batch.column("token_ids"), batch.column("logprobs")
    token_bounds, logprob_bounds = tokens.offsets.to_pylist(), logprobs.offsets.to_pylist()
    token_values = tokens.values.to_numpy(zero_copy_only=True)
    logprob_values = logprobs.values.to_numpy(zero_copy_only=True)
    finishes, origins = _known(key, batch, "finish", _FINISHES), _known(key, batch, "origin", _ORIGINS)
    names = ("response", "epoch", "start", "weight_version", "event")
    columns = [batch.column(name).to_pylist() for name in names]
    rows = [
        Row(
            response,
            epoch,
            start,
            token_values[token_bounds[index] : token_bounds[index + 1]],
            logprob_values[logprob_bounds[index] : logprob_bounds[index + 1]],
            version,
            finishes[index],
            origins[index],
            event,
        )
        for index, (response, epoch, start, version, event) in enumerate(zip(*columns, strict=True))
    ]
    for row in rows:
        if lack := row.lack():
            raise CorruptObject(key, lack)
    return rows


def _known(key: str, batch: pa.RecordBatch, column: str, members: Mapping[int, E]) -> list[E]:
    """The members of an enumeration that a column's codes stand for."""
    codes = batch.column(column).to_pylist()
    unknown = next((index for index, code in enumerate(codes) if code not in members), None)
    if unknown is not None:
        response = batch.column("response")[unknown].as_py()
        what = f"{column} {codes[unknown]} of response {response} is not one of {list(members.values())}"
        raise CorruptObject(key, what)
    return [members[code] for code in codes]
