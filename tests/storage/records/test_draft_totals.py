"""What drafts were worth, in heartbeats and in lives: left out where a member decodes without."""

import json
from dataclasses import fields, replace

import pytest

from storage.records import canonical, layout, records
from storage.records.canonical import wrap
from storage.records.crew_records import HeartbeatRecord
from storage.records.draft_totals import DraftTotals, summed
from storage.records.records import SlotLife
from storage.stores.store import CorruptObject
from tests import format_one
from tests.journals import beat

TOTALS = DraftTotals(steps=4, tokens=9, drafted=8, accepted=5, saved_s=-0.5)
KEY = layout.alive(0, "a")


@pytest.mark.parametrize("totals", [TOTALS, replace(TOTALS, saved_s=None)])
def test_a_heartbeat_and_a_life_hold_them(totals):
    told = replace(beat("a", number=1), drafts=totals)
    assert set(json.loads(canonical.encode(told))) == {each.name for each in fields(HeartbeatRecord)}
    assert records.decode(HeartbeatRecord, KEY, records.encode(KEY, told)) == told
    life = replace(format_one.LIFE, drafts=totals)
    assert canonical.decode(SlotLife, "k", canonical.encode(life)) == life
    assert json.loads(canonical.encode(life))["drafts"].keys() == {each.name for each in fields(DraftTotals)}


def test_without_drafts_they_are_left_out_and_need_not_be_there():
    plain = beat("a", number=1)
    assert set(json.loads(canonical.encode(plain))) == {each.name for each in fields(HeartbeatRecord)} - {"drafts"}
    assert b"drafts" not in canonical.encode(format_one.LIFE)
    assert records.decode(HeartbeatRecord, KEY, records.encode(KEY, plain)).drafts is None
    assert canonical.decode(SlotLife, "k", canonical.encode(format_one.LIFE)).drafts is None


@pytest.mark.parametrize(
    ("change", "where"),
    [({"accepted": "5"}, "drafts.accepted"), ({"saved_s": "NaN"}, "drafts.saved_s"), ({"k": 1}, "drafts.k")],
)
def test_what_is_not_understood_is_refused_by_name(change, where):
    document = json.loads(canonical.encode(replace(beat("a", number=1), drafts=TOTALS)))
    body = json.dumps(document | {"drafts": document["drafts"] | change}).encode()
    with pytest.raises(CorruptObject, match=where):
        records.decode(HeartbeatRecord, KEY, wrap(KEY, HeartbeatRecord.KIND, body))


def test_counts_since_an_earlier_state_and_of_several_members():
    early = DraftTotals(steps=2, tokens=3, drafted=4, accepted=1)
    late = DraftTotals(steps=6, tokens=9, drafted=9, accepted=3, saved_s=0.5)
    assert late.since(early) == DraftTotals(steps=4, tokens=6, drafted=5, accepted=2, saved_s=0.5)
    later = replace(late, saved_s=-0.25)
    assert later.since(late) == DraftTotals(saved_s=-0.75)
    assert summed((early, late, later)) == DraftTotals(steps=14, tokens=21, drafted=22, accepted=7, saved_s=0.25)
    assert summed((early,)).saved_s is None
