"""Journals written by hand: plans, and incarnations of slots that write what they are told to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from storage.journal.assembly import JournalReader
from storage.journal.claims import take_over
from storage.journal.journal import JournalWriter, PendingRows
from storage.journal.shard import Finish
from storage.records import canonical, layout, records
from storage.records.canonical import wrap
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import PlanRecord, SamplingParams, SlotPlan
from storage.stores.store import ObjectStore
from tasks.planning.division import assign_groups

LOGPROB = -1.5


def a_plan(groups: int, generations: int, slots: int = 1, **changes: Any) -> PlanRecord:
    """Iteration 0, sampled from weight version 0."""
    assignment = enumerate(assign_groups(groups, slots))
    fields: dict[str, Any] = {
        "iteration": 0,
        "weight_version": 0,
        "run_seed": 1,
        "num_generations": generations,
        "prompts_key": "prompts",
        "first_prompt": 0,
        "slots": tuple(SlotPlan(slot=slot, pool="rollout", groups=members) for slot, members in assignment),
        "sampling": SamplingParams(max_completion_length=16),
        "config": {},
        "created_at_s": 0.0,
    }
    return PlanRecord(**(fields | changes))


class Writer:
    """A JournalWriter, and the tokens that it writes next."""

    def __init__(self, store: ObjectStore, iteration: int, incarnation: str, weight_version: int) -> None:
        self._writer = JournalWriter(store, iteration, incarnation, weight_version)
        self.pending = PendingRows()

    def append(self, response: int, epoch: int, start: int, *tokens_and_finish: Any) -> None:
        self.pending.append(response, epoch, start, *tokens_and_finish)

    def flush(self) -> int:
        """Write what was appended as one shard."""
        pending, self.pending = self.pending, PendingRows()
        return self._writer.write(pending)


class Incarnation:
    """Takes its slot over from whoever holds it when it is made, and then writes what it is told to."""

    def __init__(self, store: ObjectStore, plan: PlanRecord, slot: int, name: str) -> None:
        self.name = name
        self._store = store
        self._plan = plan
        self._slot = slot
        self._writer = Writer(store, plan.iteration, name, plan.weight_version)
        reader = JournalReader(store, plan)
        reader.refresh()
        assert take_over(
            store,
            plan,
            reader.book,
            reader.shards,
            unit=slot,
            incarnation=name,
            slot=slot,
            predecessors={owner.incarnation for owner in reader.book.owners_of(slot)},
        )
        self._epoch = reader.book.epoch(slot)
        self._lengths = {r: len(reader.assemble(r).token_ids) for r in plan.responses_of(slot)}
        self.recovered = sum(self._lengths.values())

    def write(self, response: int, tokens: Sequence[int], finish: Finish = Finish.STOP) -> None:
        """One shard that continues one response."""
        logprobs = [LOGPROB] * len(tokens)
        self._writer.append(response, self._epoch, self._lengths[response], tokens, logprobs, finish)
        self._lengths[response] += len(tokens)
        self._writer.flush()

    def announce(self, *, started_at_s: float, updated_at_s: float, tokens_generated: int, gone: bool) -> None:
        """Its last sign of life."""
        state: Literal["working", "gone"] = "gone" if gone else "working"
        record = replace(
            beat(self.name, number=1, state=state, updated_at_s=updated_at_s),
            slot=self._slot,
            started_at_s=started_at_s,
            tokens_generated=tokens_generated,
            tokens_recovered=self.recovered,
        )
        records.put(self._store, layout.alive(self._plan.iteration, self.name), record)


def beat(
    incarnation: str,
    *,
    number: int,
    state: Literal["loading", "working", "gone"] = "working",
    updated_at_s: float = 0.0,
) -> HeartbeatRecord:
    """A heartbeat."""
    return HeartbeatRecord(
        incarnation=incarnation,
        slot=0,
        state=state,
        beat=number,
        pool="rollout",
        host="here",
        pid=1,
        started_at_s=0.0,
        updated_at_s=updated_at_s,
        tokens_generated=0,
        tokens_recovered=0,
        prefill_tokens=0,
        responses_finished=0,
        engine="none",
        batch_invariant=True,
    )


def newer_heartbeat(key: str, number: int = 1) -> bytes:
    """A heartbeat for `key` as a later version may write it: whole, and with one more field."""
    body = canonical.encode(beat(key.rsplit("/", 1)[1].removesuffix(".json"), number=number))
    return wrap(key, HeartbeatRecord.KIND, body[:-1] + b',"zeal":1}')
