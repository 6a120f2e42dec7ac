"""What a report says of process lives, what it holds for the next plan, and how the plan's own predictions did."""

from dataclasses import replace

import pytest

from storage.records import layout, records
from storage.records.planning_records import DecisionRecord
from storage.records.records import SlotLife
from tests.tasks.reporting.test_conclusion import PLAN, an_iteration, conclude


def test_lives_tell_what_a_killed_slot_kept_and_lost():
    lives = conclude(an_iteration()).lives
    assert lives == (
        SlotLife(
            slot=0,
            incarnation="00000-a",
            pool="rollout",
            started_at_s=1010,
            ended_at_s=1020,
            state="lost",
            tokens_kept=3,
            tokens_recovered=0,
            tokens_regenerated=4,
            prefill_tokens=10,
        ),
        SlotLife(
            slot=0,
            incarnation="00000-b",
            pool="rollout",
            started_at_s=1025,
            ended_at_s=1065,
            state="gone",
            tokens_kept=6,
            tokens_recovered=3,
            tokens_regenerated=0,
            prefill_tokens=13,
            working_at_s=1029.0,
            decode_s=30.0,
        ),
        SlotLife(
            slot=1,
            incarnation="00001-c",
            pool="rollout",
            started_at_s=1012,
            ended_at_s=1062,
            state="gone",
            tokens_kept=7,
            tokens_recovered=0,
            tokens_regenerated=0,
            prefill_tokens=20,
            working_at_s=1017.0,
            decode_s=60.0,
            puts=200,
            gets=400,
            bytes_read=500_000_000,
        ),
    )
    assert sum(life.tokens_kept for life in lives) == 16


def test_the_report_holds_what_the_next_plan_is_made_from():
    (seen,) = conclude(an_iteration()).pools
    # From 1017, the first weights, to 1065: slot 1 all the time, slot 0 for the 36 s of its second life.
    assert (seen.pool, seen.members, seen.members_at_end) == ("rollout", pytest.approx(1 + 36 / 48), 2)
    assert (seen.machine_s, seen.losses, seen.start_s) == (100, 1, 4.5)
    assert seen.step_s == ((1, 0.5), (2, 0.5))


def test_what_the_plan_foretold_stands_beside_what_came():
    store = an_iteration()
    decided = [
        DecisionRecord(name=name, chosen="", reason="", predicted={"timing_s/rollout": seconds})
        for name, seconds in (("width", 100.0), ("dispatch", 66.0))
    ]
    records.put(store, layout.plan(0), replace(PLAN, decisions=tuple(decided)))
    assert conclude(store).metrics["plan/rollout_error"] == pytest.approx(66 / 55 - 1)
