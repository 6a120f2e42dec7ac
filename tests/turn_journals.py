"""A journal with turns, written by hand: three responses of a group, of which one begins again and one fails."""

import numpy as np

from storage.journal.assembly import JournalReader
from storage.journal.shard import Finish, Origin, Row, encode_shard
from storage.journal.turns import CallRecord, TurnRecord, encode_turn
from storage.records import layout
from storage.records.records import GradedResponse, PlanRecord
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectStore
from tasks.reporting.turns_tally import TurnsTally
from tests.journals import Incarnation, a_plan

NAME = f"00000-{'7' * 16}"
PLAN = a_plan(1, 3, config={"turns": {"environment": "tests.turn_journals:Nothing"}})
LOGPROB = -0.25


def call(result: str = "8", outcome: str = "answered", *, unknown: bool = False) -> CallRecord:
    """A call of the tool `look`."""
    return CallRecord(
        call_id="c", name="look", arguments={}, result=result, outcome=outcome, unknown=unknown, seconds=0.5
    )


def turn(number: int, *calls: CallRecord, **fields: object) -> bytes:
    """The event that answers a turn, which took a second."""
    return encode_turn(TurnRecord(turn=number, calls=calls, seconds=1.0, **fields))


def said(response: int, start: int, ids: list[int], finish: Finish = Finish.ACTING) -> Row:
    """A turn of the policy."""
    logprobs = np.full(len(ids), LOGPROB, dtype=np.float32) - np.arange(len(ids), dtype=np.float32)
    return Row(response, 1, start, np.array(ids, dtype=np.uint32), logprobs, 0, finish)


def answered(response: int, start: int, ids: list[int], event: bytes, finish: Finish = Finish.RUNNING) -> Row:
    """An answer of the environment."""
    tokens, none = np.array(ids, dtype=np.uint32), np.zeros(0, dtype=np.float32)
    return Row(response, 1, start, tokens, none, 0, finish, Origin.OBSERVATION, event)


# Response 0 has two turns and the reward 0.5. Response 1 begins again, and is cut at its limit. Response 2 fails.
ROWS = [
    said(0, 0, [5, 6]),
    answered(0, 2, [9, 9, 9], turn(0, call(), call("error", "raised"))),
    said(0, 5, [7, 2]),
    answered(0, 7, [], turn(1, reward=0.5), Finish.STOP),
    said(1, 0, [3, 3, 3]),
    answered(1, 0 + 3, [], turn(0, call(), failure="it died"), Finish.AGAIN),
    said(1, 0, [4]),
    answered(1, 1, [], turn(0, call("?", "invalid", unknown=True), reward=-1.0, diverged=True), Finish.LENGTH),
    said(2, 0, [5, 5]),
    answered(2, 2, [], turn(0, call("", "lost"), failure="it died"), Finish.FAILED),
]


def journalled(store: ObjectStore, rows: list[Row] = ROWS) -> PlanRecord:
    """Write the rows under a claim of the only slot."""
    Incarnation(store, PLAN, 0, NAME)
    store.put(layout.shard(0, NAME, 0), encode_shard(rows))
    return PLAN


REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.FAILED: "failed"}


def read_back(rows: list[Row] = ROWS) -> tuple[JournalReader, list[GradedResponse]]:
    """The journal, and its responses as a trainer records them; the reward of each is its number."""
    store = MemoryStore("run")
    journalled(store, rows)
    reader = JournalReader(store, PLAN)
    reader.refresh()
    recorded = []
    for assembled in map(reader.assemble, range(PLAN.num_responses)):
        failed = assembled.finish is Finish.FAILED
        recorded.append(
            GradedResponse(
                response=assembled.response,
                length=len(assembled.token_ids),
                policy_length=assembled.policy_length,
                finish_reason=REASONS[assembled.finish],
                lineage=assembled.lineage,
                reward=None if failed else float(assembled.response),
                rewards={} if failed else {"environment": float(assembled.response)},
            )
        )
    return reader, recorded


def turns_metrics(rows: list[Row] = ROWS) -> dict[str, float]:
    """What a report says of the turns in the journal."""
    reader, recorded = read_back(rows)
    tally = TurnsTally(reader, recorded)
    tally.add(range(PLAN.num_responses))
    return tally.metrics()
