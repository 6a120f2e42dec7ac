"""Records about a crew: the heartbeats of its incarnations, and the slots that will not start again.

Every record lies in the directory of its iteration; the record of ended slots also names its execution, because another
execution has its own slots.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from storage.digests import digest_of
from storage.records import layout, records
from storage.records.draft_totals import DraftTotals
from storage.records.hints import read_hint
from storage.stores.store import ObjectStore

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class HeartbeatRecord:
    """Heartbeat of an incarnation. Members observe only its change and its load; the times are for people.

    Attributes:
        beat: number of this heartbeat, from 1.
        started_at_s, updated_at_s, working_at_s: wall-clock seconds of the process start, of this heartbeat, and of the
            first moment with weights in place (None: no weights yet).
        claims: number of claims made before this heartbeat; the load fields below include exactly those claims.
        unfinished: responses held whose end is not journalled yet.
        running, waiting, acting, released: unfinished responses that are being decoded, that wait for the engine, that
            wait for an environment, and that are free for any member.
        tokens_generated, tokens_recovered: tokens sampled by this incarnation, and tokens taken over from shards.
        prefill_tokens: tokens of prompts and recovered prefixes that the engine computed.
        tokens_per_s: recent decode rate of all running responses; None without half a claim TTL of uninterrupted
            decoding.
        plateau: batch size beyond which the decode rate no longer rises; 0: unknown.
        usd_per_hour: price of the machine; None: the price of its pool.
        room: number of further responses that the member would begin.
        decode_s: seconds spent in decode steps.
        step_s: (batch size, mean seconds of a decode step), ascending.
        puts, gets, bytes_read: requests to the store (puts include LISTs), and bytes received.
        drafts: what drafts were worth to the incarnation; None: it decodes without.
    """

    KIND: ClassVar[str] = "heartbeat"
    __pydantic_config__ = records.STRICT
    incarnation: str
    slot: int
    state: Literal["loading", "working", "gone"]
    beat: int
    pool: str
    host: str
    pid: int
    started_at_s: float
    updated_at_s: float
    tokens_generated: int
    tokens_recovered: int
    prefill_tokens: int
    responses_finished: int
    engine: str
    batch_invariant: bool
    claims: int = 0
    unfinished: int = 0
    running: int = 0
    waiting: int = 0
    acting: int = 0
    released: int = 0
    tokens_per_s: float | None = None
    plateau: int = 0
    usd_per_hour: float | None = None
    room: int = 0
    working_at_s: float | None = None
    decode_s: float = 0.0
    step_s: tuple[tuple[int, float], ...] = ()
    puts: int = 0
    gets: int = 0
    bytes_read: int = 0
    drafts: Annotated[DraftTotals | None, Field(exclude_if=lambda held: held is None)] = None


@dataclass(frozen=True, kw_only=True)
class RolloutEndedRecord:
    """The rollout map of a pool has ended: the execution starts none of `slots` again."""

    KIND: ClassVar[str] = "rollout ended"
    __pydantic_config__ = STRICT
    iteration: int
    execution: str
    pool: str
    slots: tuple[int, ...]


def note_rollout_ended(store: ObjectStore, iteration: int, execution: str, pool: str, slots: Iterable[int]) -> None:
    """Write that a pool's rollout map has ended."""
    record = RolloutEndedRecord(iteration=iteration, execution=execution, pool=pool, slots=tuple(slots))
    key = f"{layout.ended(iteration, execution_digest(execution))}{pool}.json"
    records.put(store, key, record)


def ended_slots(store: ObjectStore, iteration: int, execution: str) -> set[int]:
    """The slots that the execution does not start again in this iteration, as far as can be read."""
    keys = store.list(layout.ended(iteration, execution_digest(execution)))
    # These notes are hints, so one that is damaged is passed over.
    notes = (read_hint(store, RolloutEndedRecord, key) for key in keys)
    return {slot for note in notes if note is not None for slot in note.slots}


def execution_digest(execution: str) -> str:
    """A name for keys: names of executions may hold characters that keys may not."""
    return digest_of(execution.encode())
