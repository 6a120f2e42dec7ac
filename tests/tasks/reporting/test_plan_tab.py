"""The Deck's page of the plan's decisions: predicted against actual."""

import re

import pytest

from storage.records.planning_records import DecisionRecord
from tasks.reporting.plan_tab import plan_tab
from tests.tasks.reporting.test_deck import Rows

WIDTH = DecisionRecord(
    name="width",
    chosen="3 of rollout",
    reason="More than 3 would only wait for training <b>.",
    inputs={"train_s": 100.0, "cost_weight": 0.3, "spot/usd_per_h": 0.39},
    alternatives={"2 of rollout": {"seconds": 150.0, "usd": 1.0}, "3 of rollout": {"seconds": 100.0}},
    predicted={"timing_s/rollout": 110.0, "cost/usd_iter": 2.0, "seeding/seconds": 1.0, "cost/usd_egress": 1.0},
)


def test_a_decision_stands_beside_what_came_of_it():
    page = plan_tab([WIDTH], {"timing_s/rollout": 100.0, "cost/usd_iter": 2.5, "cost/usd_egress": 0.0})
    rows = Rows(page).rows
    assert ["rollout", "110 s", "100 s", "+10.0 %"] in rows
    assert ["cost of the iteration", "$2.00", "$2.50", "-20.0 %"] in rows
    assert ["seeding: seconds", "1", "not measured", ""] in rows
    assert ["cost: usd egress", "$1.00", "$0.00", ""] in rows
    assert ["train", "100 s"] in rows
    assert ["cost weight", "0.3"] in rows
    assert ["spot: price of a machine in an hour", "$0.3900"] in rows
    assert ["alternative", "seconds", "usd"] in rows
    assert ["3 of rollout", "100", ""] in rows
    assert "<h3>Members of each pool: 3 of rollout</h3>" in page
    assert "<p>Because: More than 3 would only wait for training &lt;b&gt;." in page


def test_the_kind_of_crew_and_the_wait_for_tools_are_said_in_words():
    crew = DecisionRecord(name="crew", chosen="standing", reason="as rollout.crew says")
    tools = DecisionRecord(name="width", chosen="2", reason="cost", inputs={"tool_s_per_token": 0.02})
    page = plan_tab([crew, tools], {})
    assert "<h3>Kind of crew: standing</h3>" in page
    assert ["seconds of waiting for tools for each token", "0.02"] in Rows(page).rows


def test_a_plan_without_decisions_says_so():
    assert "Nothing was decided" in plan_tab([], {"reward": 1.0})


@pytest.mark.slow
def test_whatever_a_plan_holds_the_page_is_small_and_well_formed():
    figures = {f"figure number {index}": 1e9 / 3 for index in range(200)}
    large = DecisionRecord(
        name="n" * 5000,
        chosen="<script>" * 1000,
        reason="r" * 50_000,
        inputs={f"{'i' * 500}{index}": float("nan") for index in range(1000)},
        alternatives={f"{'<a>' * 500}{index}": figures for index in range(1000)},
        predicted={f"{'m' * 500}{index}": 1.0 for index in range(1000)},
    )
    page = plan_tab([large] * 100, {})
    assert 50_000 < len(page.encode()) < 100_000
    assert "do not fit here" in page
    assert not Rows(page).tags & {"script", "link", "img", "iframe", "style", "a"}
    assert not re.search(r"https?://", page)
