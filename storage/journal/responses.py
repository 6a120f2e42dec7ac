"""All responses of an iteration as one Arrow object, laid out for size (docs/format.md section 9).

This module knows bytes and rows, not where the rows come from, nor when they may replace the journal (`compaction`
decides that). Lossless: log-probs are float32, kept as four byte planes, because zstd hardly compresses whole floats.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.journal.shard import EVENT_BYTES_MAX, Finish, Logprobs, TokenIds
from storage.records.framing import decode_table, encode_batches, strip_trailer
from storage.stores.store import CorruptObject

# The lowest level of 1, 3, 6, 9 and 12 that stays below 1.15 times the entropy in zstd's worst case, unordered ids from
# a Zipf vocabulary of 150,000: 1.21, 1.17, 1.151, 1.145, 1.14. On text every level is below 1, and level 9 needs 4 %
# less than level 1.
ZSTD_LEVEL = 9
PLANES = tuple(f"logprob_byte_{plane}" for plane in range(4))
TOKENS_PER_BATCH = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """A response of an iteration with tokens, end and rewards.

    Attributes:
        token_ids: uint32 [n].
        logprobs: float32 [m], of the tokens that the policy sampled.
        reward, rewards: total, and value by function; None and empty for a failed or ungraded response.
        spans: number of tokens under each claim of the lineage; the sum is n.
        origins: lengths of the stretches of tokens by the policy, an observation, the policy, and so on; the sum is n,
            the sum of the policy's stretches m.
        events: turns of the conversation with an environment, as JSON.
    """

    response: int
    group: int
    prompt_id: str
    token_ids: TokenIds
    logprobs: Logprobs
    finish: Finish
    reward: float | None
    rewards: dict[str, float | None]
    weight_version: int
    spans: tuple[int, ...]
    origins: tuple[int, ...]
    events: tuple[bytes, ...]

    @property
    def policy_length(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(self.origins[::2])

    def equals(self, other: "Response") -> bool:
        """Whether both are the same, log-probs to the last bit."""
        names = (field.name for field in dataclasses.fields(self) if field.name not in ("token_ids", "logprobs"))
        same_fields = all(getattr(self, name) == getattr(other, name) for name in names)
        same_tokens = np.array_equal(self.token_ids, other.token_ids)
        return same_fields and same_tokens and self.logprobs.tobytes() == other.logprobs.tobytes()

    def lack(self) -> str | None:
        """Why the response may not be stored or used; None if nothing is wrong."""
        of_policy = self.policy_length
        if not self.origins or sum(self.origins) != len(self.token_ids):
            return f"response {self.response}: origins {self.origins} of {len(self.token_ids)} token ids"
        if len(self.logprobs) != of_policy:
            return f"response {self.response}: {of_policy} token ids of the policy, {len(self.logprobs)} logprobs"
        if sum(self.spans) != len(self.token_ids):
            return f"response {self.response}: spans {self.spans} of {len(self.token_ids)} token ids"
        longest = max(map(len, self.events), default=0)
        if longest > EVENT_BYTES_MAX:
            return f"response {self.response}: an event of {longest} bytes; allowed: {EVENT_BYTES_MAX}"
        return None


@cache
def schema(id_type: pa.DataType) -> pa.Schema:
    """The columns; token ids are uint16 if all ids of the file fit, else uint32."""
    types = {
        "response": pa.uint32(),
        "group": pa.uint32(),
        "prompt_id": pa.string(),
        "token_ids": pa.list_(pa.field("item", id_type, nullable=False)),
        **dict.fromkeys(PLANES, pa.binary()),
        "finish": pa.uint8(),
        "reward": pa.float64(),
        "rewards": pa.map_(pa.string(), pa.float64()),
        "weight_version": pa.uint32(),
        "spans": pa.list_(pa.field("item", pa.uint32(), nullable=False)),
        "origins": pa.list_(pa.field("item", pa.uint32(), nullable=False)),
        "events": pa.list_(pa.field("item", pa.binary(), nullable=False)),
    }
    fields = [pa.field(name, kind, nullable=name == "reward") for name, kind in types.items()]
    return pa.schema(fields, metadata={b"gleaner.responses": b"1"})


def encode_responses(rows: Sequence[Response]) -> bytes:
    """The rows as one Arrow object; raises ValueError if a row is not recorded or its columns disagree."""
    for row in rows:
        if lack := _reward_lack(row) or row.lack():
            raise ValueError(lack)
    largest = max((int(row.token_ids.max()) for row in rows if len(row.token_ids)), default=0)
    fields = schema(pa.uint16() if largest <= np.iinfo(np.uint16).max else pa.uint32())
    return encode_batches(fields, [_batch(part, fields) for part in _parts(rows)], zstd_level=ZSTD_LEVEL)


def decode_responses(key: str, body: bytes) -> list[Response]:
    """The rows in written order; raises CorruptObject, which names `key`, and never returns a part."""
    return [row for batch in open_responses(key, body).to_batches() for row in _rows(key, batch)]


def open_responses(key: str, body: bytes) -> pa.Table:
    """The object as a table in memory, of which `find_response` builds single rows; raises CorruptObject."""
    return decode_table(key, body, schema(_id_type(strip_trailer(key, body))))


def find_response(key: str, table: pa.Table, number: int) -> Response | None:
    """The row of a response in a table from `open_responses`, whose rows ascend; None if the row is missing.

    Raises CorruptObject, which names `key`, if the columns of the row contradict each other.
    """
    for batch in table.to_batches():
        numbers = batch.column("response").to_numpy()
        at = int(np.searchsorted(numbers, number))
        if at < len(numbers) and numbers[at] == number:
            return next(_rows(key, batch.slice(at, 1)))
    return None


def join_planes(planes: Sequence[npt.NDArray[np.uint8]]) -> Logprobs:
    """The float32 values whose byte k, counted from the least significant, is in planes[k]."""
    return np.stack(planes, axis=1).reshape(-1).view("<f4").astype(np.float32, copy=False)


def split_planes(values: Logprobs) -> npt.NDArray[np.uint8]:
    """Bytes of float32 values [n] as uint8 [4, n], the least significant first."""
    return np.ascontiguousarray(values.astype("<f4", copy=False).view(np.uint8).reshape(-1, 4).T)


def _parts(rows: Sequence[Response]) -> Iterator[Sequence[Response]]:
    """The rows in order, in parts small enough for Arrow's 32-bit offsets and our memory; at least one part."""
    start, tokens = 0, 0
    for index, row in enumerate(rows):
        tokens += len(row.token_ids)
        if tokens >= TOKENS_PER_BATCH:
            yield rows[start : index + 1]
            start, tokens = index + 1, 0
    if start < len(rows):
        yield rows[start:]


def _batch(rows: Sequence[Response], fields: pa.Schema) -> pa.RecordBatch:
    offsets = np.cumsum([0, *(len(row.token_ids) for row in rows)], dtype=np.int32)
    plane_offsets = np.cumsum([0, *(len(row.logprobs) for row in rows)], dtype=np.int32)
    ids_type = fields.field("token_ids").type
    ids = np.concatenate([row.token_ids for row in rows]).astype(ids_type.value_type.to_pandas_dtype(), copy=False)
    planes = split_planes(np.concatenate([row.logprobs for row in rows]))
    columns = {
        "response": [row.response for row in rows],
        "group": [row.group for row in rows],
        "prompt_id": [row.prompt_id for row in rows],
        "finish": [int(row.finish) for row in rows],
        "reward": [row.reward for row in rows],
        "rewards": [list(row.rewards.items()) for row in rows],
        "weight_version": [row.weight_version for row in rows],
        "spans": [row.spans for row in rows],
        "origins": [row.origins for row in rows],
        "events": [row.events for row in rows],
    }
    arrays = {name: pa.array(values, type=fields.field(name).type) for name, values in columns.items()}
    arrays["token_ids"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids), type=ids_type)
    for name, plane in zip(PLANES, planes, strict=True):
        buffers = [None, pa.py_buffer(plane_offsets), pa.py_buffer(plane)]
        arrays[name] = pa.Array.from_buffers(pa.binary(), len(rows), buffers)
    return pa.RecordBatch.from_arrays([arrays[name] for name in fields.names], schema=fields)


def _id_type(stream: memoryview) -> pa.DataType:
    """The type of token ids that the file declares; decode_table reports everything that is wrong with the rest."""
    try:
        found = pa.ipc.read_schema(pa.py_buffer(stream)).field("token_ids").type.value_type
    except (pa.ArrowInvalid, KeyError, AttributeError):
        return pa.uint32()
    return found if found == pa.uint16() else pa.uint32()


def _rows(key: str, batch: pa.RecordBatch) -> Iterator[Response]:
    tokens = batch.column("token_ids")
    offsets = tokens.offsets.to_numpy()
    first, bounds = int(offsets[0]), offsets - offsets[0]
    ids = tokens.values[first : first + int(bounds[-1])].to_numpy(zero_copy_only=True).astype(np.uint32, copy=False)
    planes = [_plane(batch.column(name)) for name in PLANES]
    plane_bounds = planes[0][0]
    for name, (found, _) in zip(PLANES, planes, strict=True):
        if not np.array_equal(found, plane_bounds):
            raise CorruptObject(key, f"{PLANES[0]} and {name} have different lengths")
    logprobs = join_planes([values for _, values in planes])
    names = ("response", "group", "prompt_id", "finish", "reward", "rewards", "weight_version", "spans")
    columns = [batch.column(name).to_pylist() for name in (*names, "origins", "events")]
    for index, values in enumerate(zip(*columns, strict=True)):
        response, group, prompt_id, finish, reward, rewards, version, spans, origins, events = values
        if finish not in (Finish.STOP, Finish.LENGTH, Finish.FAILED):
            allowed = "allowed: 1 (stop), 2 (length), 5 (failed)"
            raise CorruptObject(key, f"finish code {finish} of response {response}; {allowed}")
        row = Response(
            response,
            group,
            prompt_id,
            ids[bounds[index] : bounds[index + 1]],
            logprobs[plane_bounds[index] : plane_bounds[index + 1]],
            Finish(finish),
            reward,
            dict(rewards),
            version,
            tuple(spans),
            tuple(origins),
            tuple(events),
        )
        if lack := _reward_lack(row) or row.lack():
            raise CorruptObject(key, lack)
        yield row


def _reward_lack(row: Response) -> str | None:
    """Why the reward does not fit the end of a recorded response."""
    if (row.reward is None) == (row.finish is Finish.FAILED):
        return None
    allowed = "none" if row.finish is Finish.FAILED else "one"
    return f"response {row.response}: reward {row.reward} with finish {row.finish.name.lower()}; allowed: {allowed}"


def _plane(column: pa.Array) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Where the bytes of each response begin, and at last end, in a plane; and the bytes."""
    _, offsets, data = column.buffers()
    found = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    first, last = int(found[0]), int(found[-1])
    values = np.frombuffer(data, dtype=np.uint8)[first:last] if last > first else np.zeros(0, dtype=np.uint8)
    return found - first, values
