"""What the demos call equal: everything of a response but how long it took and who generated which part."""

from dataclasses import replace

import numpy as np
import pytest

from examples.compare import identical_responses
from storage.journal.assembly import Assembled
from storage.journal.responses import Response
from storage.journal.shard import Finish
from storage.journal.turns import CallRecord, TurnRecord, encode_turn


def turn(*, result: str = "1", reward: float | None = 1.0, unknown: bool = False, seconds: float = 0.1) -> bytes:
    call = CallRecord(
        call_id="a",
        name="look",
        arguments={"key": "b"},
        result=result,
        outcome="answered",
        unknown=unknown,
        seconds=seconds,
    )
    return encode_turn(TurnRecord(turn=0, calls=(call,), seconds=seconds, reward=reward))


TOKENS, LOGPROBS = np.array([3, 4, 5], dtype=np.uint32), np.array([-0.5, -0.5], dtype=np.float32)
KEPT = Response(0, 0, "p", TOKENS, LOGPROBS, Finish.STOP, 1.0, {}, 0, (3,), (1, 1, 1), (turn(unknown=True),))
AGAIN = Assembled(
    response=0,
    token_ids=TOKENS,
    logprobs=LOGPROBS + 1e-6,
    finish=Finish.STOP,
    lineage=(),
    span_tokens=(1, 2),
    weight_versions=np.zeros(3, dtype=np.uint32),
    origins=(1, 1, 1),
    events=(turn(seconds=9.0),),
    owes=False,
    restarts=0,
)


def test_who_generated_it_and_for_how_long_makes_no_difference():
    assert identical_responses(KEPT, AGAIN)


@pytest.mark.parametrize(
    "changed",
    [
        {"token_ids": np.array([3, 4, 6], dtype=np.uint32)},
        {"finish": Finish.LENGTH},
        {"origins": (2, 1)},
        {"events": ()},
        {"events": (turn(result="2"),)},
        {"events": (turn(reward=0.0),)},
    ],
    ids=",".join,
)
def test_any_other_difference_is_found(changed):
    assert not identical_responses(KEPT, replace(AGAIN, **changed))
