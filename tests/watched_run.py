"""An iteration of two slots that is watched: heartbeats, steals, batches and a report, written by hand."""

from collections.abc import Sequence
from typing import Any

from storage.journal.claims import ClaimBook, take_over
from storage.journal.journal import ShardReader
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import BatchRecord, GradedResponse, ReportRecord
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectStore, StoreUnavailable
from tests.committed_runs import begin
from tests.journals import a_plan

TTL_S = 30.0
PLAN = a_plan(groups=4, generations=2, slots=2, config={"rollout": {"claim_ttl_s": TTL_S}})  # slot 0: groups 0, 2


class Counted(MemoryStore):
    """Remembers which keys were asked for and what was written."""

    def __init__(self) -> None:
        super().__init__("run")
        self.asked: list[str] = []
        self.listed: list[str] = []
        self.written: list[str] = []
        self.answers = True

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if not self.answers:
            raise StoreUnavailable("no answer within 5 s")
        self.asked.append(key)
        return super().get(key, start, end)

    def list(self, prefix: str, after: str = "") -> "list[str]":
        self.listed.append(prefix)
        return super().list(prefix, after)

    def create(self, key: str, body: bytes) -> bool:
        self.written.append(key)
        return super().create(key, body)

    def put(self, key: str, body: bytes) -> None:
        self.written.append(key)
        super().put(key, body)

    def delete(self, key: str) -> None:
        self.written.append(key)
        super().delete(key)


def beat(store: ObjectStore, name: str, number: int, **changes: Any) -> None:
    """A heartbeat; the slot is the one in the name."""
    fields: dict[str, Any] = {
        "incarnation": name,
        "slot": int(name[:5]),
        "state": "working",
        "beat": number,
        "pool": "spot",
        "host": "node-1",
        "pid": 1,
        "started_at_s": 1e9,
        "updated_at_s": -1e9,  # another machine's clock may say anything
        "tokens_generated": 7,
        "tokens_recovered": 3,
        "prefill_tokens": 0,
        "responses_finished": 0,
        "engine": "none",
        "batch_invariant": True,
    }
    records.put(store, layout.alive(0, name), HeartbeatRecord(**fields | changes))


def steal(store: ObjectStore, unit: int, responses: tuple[int, ...], victim: str, thief: str) -> None:
    """A claim by another incarnation on what `victim` holds."""
    book, shards = ClaimBook(store, PLAN), ShardReader(store, 0)
    book.refresh()
    slot = int(thief[:5])
    assert take_over(
        store,
        PLAN,
        book,
        shards,
        unit=unit,
        incarnation=thief,
        slot=slot,
        predecessors={victim},
        responses=responses,
    )


def record_batch(store: ObjectStore, number: int, groups: Sequence[int]) -> None:
    """A micro-batch of whole groups, all of whose responses have 3 tokens."""
    graded = tuple(
        GradedResponse(
            response=response,
            length=3,
            policy_length=3,
            finish_reason="stop",
            lineage=(),
            reward=0.0,
            rewards={"reward": 0.0},
        )
        for group in groups
        for response in (2 * group, 2 * group + 1)
    )
    batch = BatchRecord(iteration=0, number=number, responses=graded)
    records.put(store, layout.batch(0, number), batch)


def commit_report(store: ObjectStore) -> None:
    """The report of 8 responses of 3 tokens."""
    report = ReportRecord(
        iteration=0,
        weight_version=1,
        next_prompt=4,
        metrics={},
        rewards=(0.0,) * 8,
        lengths=(3,) * 8,
        lives=(),
        train_started_at_s=0.0,
        train_ended_at_s=0.0,
        created_at_s=0.0,
    )
    records.put(store, layout.report(0), report)


def planned() -> Counted:
    """A store with the plan, to which nobody has come."""
    store = Counted()
    begin(store)
    records.put(store, layout.plan(0), PLAN)
    return store
