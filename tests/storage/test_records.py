import json
from dataclasses import replace

import pytest

from storage import records
from storage.memory import MemoryStore
from storage.records import (
    BatchRecord,
    ClaimRecord,
    GradedResponse,
    LeaseRecord,
    PlanRecord,
    ReportRecord,
    SlotLife,
    Span,
)
from storage.store import CorruptObject, ObjectMissing
from tests.journals import a_plan

BATCH = BatchRecord(
    iteration=1,
    number=0,
    responses=(
        GradedResponse(
            response=4,
            length=9,
            finish_reason="stop",
            lineage=(Span(epoch=1, incarnation="00000-a", last_sequence=3),),
            reward=0.1 + 0.2,
            rewards={"math": None, "style": 1.0},
        ),
    ),
)


def test_round_trip_is_exact():
    assert records.decode(BatchRecord, "k", records.encode(BATCH)) == BATCH


def test_two_records_of_equal_content_differ_by_their_nonce():
    assert records.encode(LeaseRecord(holder="a")) != records.encode(LeaseRecord(holder="a"))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"format": 2}, "format"),
        ({"surprise": 1}, "surprise"),
        ({"epoch": "one"}, "epoch"),
        ({"sealed": {"a": "x"}}, "sealed.a"),
        ({"unit": None}, "unit"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, where):
    claim = ClaimRecord(unit=0, epoch=1, incarnation="a", slot=0, responses=None, sealed={})
    body = json.dumps({**json.loads(records.encode(claim)), **change}).encode()
    with pytest.raises(CorruptObject, match=f"'claims/x' is corrupt: {where}"):
        records.decode(ClaimRecord, "claims/x", body)


def test_a_life_from_before_prefill_was_counted_has_none():
    fields = {
        "slot": 0,
        "incarnation": "00000-a",
        "pool": "rollout",
        "started_at_s": 1.0,
        "ended_at_s": 2.0,
        "state": "gone",
        "tokens_kept": 3,
        "tokens_recovered": 0,
        "tokens_regenerated": 0,
        "usd_per_hour": None,
    }
    assert records.decode(SlotLife, "k", json.dumps(fields).encode()).prefill_tokens == 0
    counted = json.dumps(fields | {"prefill_tokens": 7}).encode()
    assert records.decode(SlotLife, "k", counted).prefill_tokens == 7


def test_a_truncated_record_is_refused():
    with pytest.raises(CorruptObject, match="'k'"):
        records.decode(BatchRecord, "k", records.encode(BATCH)[:-5])


def test_reading_a_missing_record_says_so():
    with pytest.raises(ObjectMissing):
        records.read(MemoryStore(), BatchRecord, "batches/0")


def test_fields_that_came_later_are_left_out_where_they_have_their_default():
    assert "filtered" not in json.loads(records.encode(BATCH))
    assert "groups_wanted" not in json.loads(records.encode(a_plan(2, 2)))
    body = records.encode(replace(BATCH, filtered=BATCH.responses))
    assert json.loads(body)["filtered"] == json.loads(body)["responses"]
    assert records.decode(BatchRecord, "k", body).graded == BATCH.responses * 2
    wanted = a_plan(2, 2, groups_wanted=1)
    assert records.decode(PlanRecord, "k", records.encode(wanted)) == wanted


def test_a_later_field_of_a_record_within_a_record_is_left_out_too():
    life = SlotLife(
        slot=0,
        incarnation="00000-a",
        pool="rollout",
        started_at_s=1.0,
        ended_at_s=2.0,
        state="gone",
        tokens_kept=3,
        tokens_recovered=0,
        tokens_regenerated=0,
    )
    report = ReportRecord(
        iteration=0,
        weight_version=1,
        next_prompt=0,
        metrics={},
        rewards=(),
        lengths=(),
        lives=(life, replace(life, tokens_unused=4)),
        train_started_at_s=0.0,
        train_ended_at_s=0.0,
        created_at_s=0.0,
    )
    body = records.encode(report)
    assert ["tokens_unused" in written for written in json.loads(body)["lives"]] == [False, True]
    assert records.decode(ReportRecord, "k", body) == report
