"""What is known of every response of an iteration without its text: state, length, rewards, and which slot wrote it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from storage.journal.assembly import JournalReader
from storage.journal.compaction import each_batch
from storage.journal.response_parts import PART_TOKENS, divide
from storage.journal.shard import Finish
from storage.records import layout
from storage.records.records import BatchRecord, GradedResponse, PlanRecord, Span
from storage.records.run import exists
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore

# trained, filtered: recorded in a batch. ended: not graded yet. acting: it waits for its environment. failed: that is
# lost for good, and the response is left out of its group. unused: the iteration was closed without it.
State = Literal["not begun", "running", "released", "acting", "ended", "trained", "filtered", "failed", "unused"]
LIVE_STATES: dict[Finish, State] = {
    Finish.RUNNING: "running",
    Finish.RELEASED: "released",
    Finish.ACTING: "acting",
    Finish.FAILED: "failed",
}


@dataclass(frozen=True, kw_only=True)
class ResponseIndex:
    """Columns with one value for each response of the plan, in the order of their numbers.

    Attributes:
        iteration: The iteration.
        num_generations: Responses per group; response r belongs to group r // num_generations.
        states: See State.
        lengths: Tokens that are durable.
        truncated: Whether the limit on the response or the context ended it.
        rewards: The weighted sum; None while the response is not graded.
        rewards_by_name: The value of each reward function; None where it is not applicable or not known.
        slots: The slot that wrote its last tokens; None if it was not begun.
        stretches: How many incarnations, one after another, wrote it; a response with more than one was resumed.
        batches: The micro-batch that records it; None if none does.
    """

    iteration: int
    num_generations: int
    states: list[State]
    lengths: list[int]
    truncated: list[bool]
    rewards: list[float | None]
    rewards_by_name: dict[str, list[float | None]] = field(default_factory=dict)
    slots: list[int | None]
    stretches: list[int]
    batches: list[int | None]

    def set_recorded(self, graded: Iterable[GradedResponse], state: State, batch: int, *, is_graded: bool) -> None:
        """Fill in responses that a micro-batch records; is_graded: as in the plan."""
        for each in graded:
            number = each.response
            known: State = "failed" if each.finish_reason == "failed" else state
            self._set_journalled(number, known, each.length, each.finish_reason == "length", each.lineage)
            self.batches[number] = batch
            self.rewards[number] = each.reward if is_graded else None
            for name, value in each.rewards.items():
                if name not in self.rewards_by_name:
                    self.rewards_by_name[name] = [None] * len(self.states)
                self.rewards_by_name[name][number] = value

    def set_live(self, number: int, finish: Finish, length: int, lineage: tuple[Span, ...]) -> None:
        """Fill in a response that no micro-batch records yet."""
        state = LIVE_STATES.get(finish, "ended") if lineage else "not begun"
        self._set_journalled(number, state, length, finish is Finish.LENGTH, lineage)

    def _set_journalled(
        self, number: int, state: State, length: int, is_truncated: bool, lineage: tuple[Span, ...]
    ) -> None:
        self.states[number], self.lengths[number], self.truncated[number] = state, length, is_truncated
        self.stretches[number] = len({span.incarnation for span in lineage})
        self.slots[number] = slot_of(lineage[-1].incarnation) if lineage else None


def slot_of(incarnation: str) -> int:
    """The slot in an incarnation's name."""
    return int(incarnation.partition("-")[0])


def read_index(store: ObjectStore, plan: PlanRecord, part_tokens: int = PART_TOKENS) -> ResponseIndex:
    """The index of an iteration as it is now; it holds at most `part_tokens` tokens at a time.

    Recorded responses are as their batches say, so the tokens of an iteration that has ended are not read. Raises
    CorruptObject.
    """
    count = plan.num_responses
    index = ResponseIndex(
        iteration=plan.iteration,
        num_generations=plan.num_generations,
        states=["not begun"] * count,
        lengths=[0] * count,
        truncated=[False] * count,
        rewards=[None] * count,
        slots=[None] * count,
        stretches=[0] * count,
        batches=[None] * count,
    )
    is_closed = exists(store, layout.closed(plan.iteration))
    for batch in each_batch(store, plan.iteration):
        _record(index, plan, batch)
    rest = [number for number in range(count) if index.batches[number] is None]
    if is_closed:
        for number in rest:
            index.states[number] = "unused"
    elif rest:
        try:
            _read_live(store, plan, index, rest, part_tokens)
        except (CorruptObject, ObjectMissing):
            # The iteration may have been closed, compacted and deleted while it was read.
            if not exists(store, layout.closed(plan.iteration)):
                raise
            return read_index(store, plan, part_tokens)
    return index


def _record(index: ResponseIndex, plan: PlanRecord, batch: BatchRecord) -> None:
    last = max((graded.response for graded in batch.graded), default=-1)
    if last >= len(index.states):
        key = layout.batch(plan.iteration, batch.number)
        raise CorruptObject(key, f"it names response {last}; the plan has {len(index.states)}")
    index.set_recorded(batch.responses, "trained", batch.number, is_graded=plan.is_graded)
    index.set_recorded(batch.filtered, "filtered", batch.number, is_graded=plan.is_graded)


def _read_live(store: ObjectStore, plan: PlanRecord, index: ResponseIndex, rest: list[int], part_tokens: int) -> None:
    longest, unrecorded = plan.sampling.max_completion_length, set(rest)
    lengths = {number: longest if number in unrecorded else 0 for number in range(plan.num_responses)}
    reader = JournalReader(store, plan, parts=divide(lengths, part_tokens))
    reader.refresh()
    for part in reader.parts():
        for number in part:
            if number in unrecorded:
                found = reader.assemble(number)
                index.set_live(number, found.finish, len(found.token_ids), found.lineage)
