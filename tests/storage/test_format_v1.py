"""Objects written by format version 1 must stay readable: these files are never written again."""

from pathlib import Path

import pytest

from storage import records
from storage.prompt_table import decode_prompts
from storage.records import BatchRecord, ClaimRecord, PlanRecord, Span
from storage.shard import Finish, decode_shard

V1 = Path(__file__).parents[1] / "data" / "v1"


def test_a_shard():
    first, second = decode_shard("shard", (V1 / "shard.arrow").read_bytes())
    assert (first.response, first.epoch, first.start, first.weight_version, first.finish) == (
        0,
        1,
        0,
        3,
        Finish.RUNNING,
    )
    assert first.token_ids.tolist() == [5, 6, 7]
    assert first.logprobs.tolist() == [-0.5, -0.25, -1.5]
    assert (second.response, second.epoch, second.start, second.finish) == (1, 2, 4, Finish.STOP)


def test_a_prompt_table():
    first, second = decode_prompts("prompts", (V1 / "prompts.arrow").read_bytes())
    assert (first.prompt_id, first.token_ids, first.prompt, first.columns) == ("a", (1, 2, 3), "1+1=", {"answer": "2"})
    assert second.prompt == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(("kind", "name"), [(PlanRecord, "plan"), (ClaimRecord, "claim"), (BatchRecord, "batch")])
def test_records_are_read_and_would_be_written_the_same(kind, name):
    body = (V1 / f"{name}.json").read_bytes()
    assert records.encode(records.decode(kind, name, body)) == body


def test_what_the_records_say():
    plan = records.decode(PlanRecord, "plan", (V1 / "plan.json").read_bytes())
    assert (plan.num_responses, plan.responses_of(1)) == (4, (2, 3))
    claim = records.decode(ClaimRecord, "claim", (V1 / "claim.json").read_bytes())
    assert (claim.responses, claim.sealed) == ((3,), {"00001-a": 4})
    batch = records.decode(BatchRecord, "batch", (V1 / "batch.json").read_bytes())
    assert batch.responses[0].lineage == (Span(epoch=1, incarnation="00000-a", last_sequence=0),)
