import json
import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.records import canonical, layout, records
from storage.records.canonical import wrap
from storage.records.lineage import ReplayedGroup
from storage.records.records import (
    BatchRecord,
    ClaimRecord,
    GradedResponse,
    LeaseRecord,
    PlanRecord,
    SettingsRecord,
    Span,
    TrainingRecord,
)
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject, ObjectMissing
from tests.journals import a_plan

KEY = "iterations/000001/batches/000000.json"
BATCH = BatchRecord(
    iteration=1,
    number=0,
    responses=(
        GradedResponse(
            response=4,
            length=9,
            policy_length=9,
            finish_reason="stop",
            lineage=(Span(epoch=1, incarnation="00000-a", last_sequence=3),),
            reward=0.1 + 0.2,
            rewards={"math": None, "style": 1.0},
        ),
    ),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)


def test_round_trip_is_exact():
    assert records.decode(BatchRecord, KEY, records.encode(KEY, BATCH)) == BATCH


@given(config=st.dictionaries(TEXTS, VALUES, max_size=5), execution=TEXTS)
def test_whatever_is_in_a_record_comes_back(config, execution):
    settings = SettingsRecord(config=config, execution=execution)
    data = records.encode("settings.json", settings)
    assert records.decode(SettingsRecord, "settings.json", data) == settings
    assert json.loads(data)["body"] == {"config": config, "ends_execution": False, "execution": execution}
    assert records.encode("settings.json", records.decode(SettingsRecord, "settings.json", data)) == data


@given(st.dictionaries(TEXTS, st.floats(), max_size=5))
def test_numbers_come_back_to_the_last_bit(metrics):
    record = TrainingRecord(
        iteration=0, weight_version=1, metrics=metrics, reward_errors=(), started_at_s=0.0, ended_at_s=math.inf
    )
    found = records.decode(TrainingRecord, "k", records.encode("k", record)).metrics
    assert {name: value.hex() for name, value in found.items()} == {n: v.hex() for n, v in metrics.items()}


def test_an_object_has_exactly_the_documented_layout():
    claim = ClaimRecord(unit=0, epoch=1, incarnation="a", slot=0, responses=(2, 1), sealed={"b": 3, "a": -1}, nonce="n")
    assert records.encode("claims/00000/000001.json", claim) == (
        b'{"body":{"epoch":1,"incarnation":"a","nonce":"n","responses":[2,1],"sealed":{"a":-1,"b":3},"slot":0,'
        b'"unit":0},"digest":"b430df1e66ea8c535c4ed59cdbb90d63","format":1,"key":"claims/00000/000001.json",'
        b'"kind":"claim"}'
    )


def test_two_records_of_equal_content_differ_by_their_nonce():
    assert records.encode("k", LeaseRecord(holder="a")) != records.encode("k", LeaseRecord(holder="a"))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"surprise": 1}, "surprise"),
        ({"format": 1}, "format"),
        ({"epoch": "one"}, "epoch"),
        ({"sealed": {"a": "x"}}, "sealed.a"),
        ({"unit": None}, "unit"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, where):
    claim = ClaimRecord(unit=0, epoch=1, incarnation="a", slot=0, responses=None, sealed={})
    body = json.dumps({**json.loads(canonical.encode(claim)), **change}).encode()
    with pytest.raises(CorruptObject, match=f"'claims/x' is corrupt: {where}"):
        records.decode(ClaimRecord, "claims/x", wrap("claims/x", "claim", body))


REPLAYED = ReplayedGroup(url="s3://bucket/run", iteration=3, group=1, weight_version=2)


def test_every_field_is_written():
    assert set(json.loads(canonical.encode(BATCH))) == {each.name for each in fields(BATCH)} - {"given_up"}
    with_given_up = replace(BATCH, given_up=("math: too long",))
    assert set(json.loads(canonical.encode(with_given_up))) == {each.name for each in fields(BATCH)}
    assert records.decode(BatchRecord, "batches/0", records.encode("batches/0", with_given_up)) == with_given_up
    plan = json.loads(canonical.encode(a_plan(2, 2)))
    absent = {"tools", "prompts_per_epoch", "counted_from", "replayed"}  # not in old plans
    assert set(plan) == {each.name for each in fields(PlanRecord)} - absent
    whole = a_plan(2, 2, tools=({"type": "function"},), prompts_per_epoch=7, counted_from=3, replayed=(REPLAYED,))
    assert set(json.loads(canonical.encode(whole))) == {each.name for each in fields(PlanRecord)}
    assert records.decode(PlanRecord, "plan.json", records.encode("plan.json", whole)) == whole
    assert plan["groups_wanted"] is None
    assert plan["slots"][0]["batch_max"] is None


def test_graded_responses_are_the_trained_and_the_filtered():
    assert replace(BATCH, filtered=BATCH.responses).graded == BATCH.responses * 2


def test_a_record_is_stored_under_the_key_it_was_encoded_for():
    store = MemoryStore()
    assert records.commit(store, layout.lease(1), LeaseRecord(holder="a"))
    assert not records.commit(store, layout.lease(1), LeaseRecord(holder="b"))
    assert records.read(store, LeaseRecord, layout.lease(1)).holder == "a"
    records.put(store, layout.lease(1), LeaseRecord(holder="c"))
    assert records.read(store, LeaseRecord, layout.lease(1)).holder == "c"


def test_reading_a_missing_record_says_so():
    with pytest.raises(ObjectMissing):
        records.read(MemoryStore(), BatchRecord, "batches/0")


def test_a_message_with_half_of_a_character_does_not_make_a_record_unreadable():
    batch = replace(BATCH, reward_errors=("style: \ud83d is bad", "\U0001f600 is not"))
    found = records.decode(BatchRecord, layout.batch(0, 0), records.encode(layout.batch(0, 0), batch))
    assert found == replace(batch, reward_errors=("style: ? is bad", "\U0001f600 is not"))
