import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.prices import PRICES_VARIABLE
from resources.spot_trace import TraceError
from storage.records import records
from storage.records.forecast_records import ForecastRecord, SetupForecast
from tasks.configuration.run_config import load, parse
from tasks.forecasting.comparison import PARTS, forecast, recommend, refusal
from tasks.forecasting.probe import NoProbe
from tasks.forecasting.table import forecast_text, snippet_yaml
from tests.forecast_documents import a_setup, document

pytestmark = pytest.mark.usefixtures("few_simulations")
UNPROBED = NoProbe(reason="not asked")
EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen2_5_7b_math.yaml"
SETUPS = (a_setup("slow", 20, 100), a_setup("middle", 12, 120), a_setup("fast", 10, 200), a_setup("bad", 21, 201))


def made(**sections: Any) -> ForecastRecord:
    return forecast(parse(document(**sections)), UNPROBED, created_at_s=1.0)


@pytest.fixture(scope="module")
def record(few_simulations: None) -> ForecastRecord:
    return made()


def test_setups_are_compared_with_figures_that_add_up(record: ForecastRecord):
    names = [one.name for one in record.setups]
    # Two members beside the trainer's engines are what is configured.
    assert names == ["as configured", "reserved only", "spot only, 1", "spot only, 2", "spot only, 4",
                     "reserved + spot, 1", "reserved + spot, 4", "spot standing, 1",
                     "spot standing, 2", "spot standing, 4", "width by cost"]  # fmt: skip
    for one in record.setups:
        assert one.hours is not None
        assert one.usd is not None
        assert one.tokens_per_s is not None
        assert one.usd_per_mtok is not None
        assert {*one.usd_parts} == {*PARTS}
        assert 0 < one.hours.low <= one.hours.median <= one.hours.high
        tokens = one.tokens_per_s.median * one.hours.median * 3600
        assert one.usd_per_mtok.low * 0.9 < one.usd.median / tokens * 1e6 < one.usd_per_mtok.high * 1.1
        # Of two seeds, medians are means, so that the parts add up.
        assert sum(one.usd_parts.values()) == pytest.approx(one.usd.median)
        assert 10 * 64 * 100 < tokens < 10 * 64 * 2048
    assert record.recommended in names
    assert {*record.sensitivity} <= {"0.3", "3"}


@pytest.mark.slow
def test_the_same_configuration_gives_the_same_forecast(record: ForecastRecord):
    assert made() == record
    assert records.decode(ForecastRecord, "key", records.encode("key", record)) == record


def test_a_setup_larger_than_the_trace_is_left_out_and_no_other(tmp_path: Path):
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n500000,remove,a\n600000,add,c\n40000000,remove,b\n")
    traced = {"rollout": {**document()["pools"]["rollout"], "trace_path": str(trace)}}
    found = made(forecast={**document()["forecast"], "widths": [2, 3]}, pools=traced)
    assert found.setup("as configured").hours is not None
    assert found.setup("spot only, 3").hours is None
    assert found.setup("spot only, 3").refused == "places: value 3; allowed: 1 to 2, the most nodes up at one time"
    trace.write_text("0,add\n")
    with pytest.raises(TraceError, match="line 1: value '0,add'"):
        made(pools=traced)


def test_a_standing_crew_is_recommended_where_engines_start_slowly_and_says_why(monkeypatch):
    monkeypatch.setattr("tasks.forecasting.crew_inputs.VLLM_START_S", 600.0)
    monkeypatch.setattr("tasks.forecasting.trainer_inputs.VLLM_START_S", 600.0)
    found = made()
    assert found.snippet["rollout.crew"] == "standing"
    assert "; the same with rollout.crew 'iteration' takes " in found.reason
    assert "Run it in parts of" not in found.reason
    often = made(forecast={**document()["forecast"], "iterations": 2000})
    assert often.snippet["rollout.crew"] == "standing"
    # The process has 0.61 losses an hour.
    said = re.search(r"\. Run it in parts of about 1\.6 h \(--count (\d+)\), because ", often.reason)
    assert said is not None
    hours = often.setup(often.recommended).hours
    assert hours is not None
    assert int(said[1]) == int(2000 * 1.64 / hours.median)
    assert refusal(parse(document()), found.snippet) is None
    # What saves by letting machines go is not combined with machines that stay.
    saving = made(planning={"usd_per_iteration_max": 1000.0})
    assert not any("standing" in one.name for one in saving.setups)


def test_reserved_machines_alone_cost_at_least_what_they_cost(record: ForecastRecord):
    reserved = record.setup("reserved only")
    assert reserved.usd is not None
    assert reserved.hours is not None
    # An L4 at the price table's 0.8048.
    assert reserved.usd.median == pytest.approx(reserved.hours.median * 0.8048, rel=0.02)
    assert reserved.members == 0


def test_text_shows_sources_and_what_an_interval_does_not_cover(record: ForecastRecord):
    text = forecast_text(record)
    assert f"{record.recommended} *" in text
    assert "It does not cover wrong inputs" in " ".join(text.split())
    assert "estimated: 1 x L4" in text
    assert f"Recommended: {record.recommended}, with " in text


def test_a_setup_that_the_planner_refuses_is_shown_with_its_reason():
    refused = made(planning={"usd_per_iteration_max": 0.05}, forecast={"widths": [1]})
    text = forecast_text(refused)
    assert all(one.refused for one in refused.setups if one.hours is None)
    assert "usd_per_iteration_max: 0.05 given" in (refused.setup("spot only, 1").refused or "")
    assert refused.recommended != "spot only, 1"
    assert "cannot be planned: " in text


@pytest.mark.parametrize(("cost_weight", "chosen"), [(0.0, "fast"), (0.5, "middle"), (1.0, "slow")])
def test_the_weight_decides_between_hours_and_dollars(cost_weight: float, chosen: str):
    best, reason = recommend(SETUPS, cost_weight)
    assert best.name == chosen
    assert reason.startswith(f"{chosen}, with {best.hours.median:.1f} h and $" if best.hours else "")
    assert f"planning.cost_weight {cost_weight:g}" in reason


def test_the_reason_names_what_was_given_up():
    _, reason = recommend(SETUPS, 0.5)
    assert reason.endswith(
        "the cheapest (slow) takes 67% longer and costs 17% less, the fastest (fast) is 17% faster and costs 67% more"
    )
    _, reason = recommend(SETUPS[2:], 0.5)
    assert reason == "fast, with 10.0 h and $200, is the fastest and the cheapest"


@given(
    figures=st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 1e5)), min_size=1, max_size=8),
    cost_weight=st.floats(0, 1),
)
def test_what_is_recommended_is_beaten_by_none_in_both(figures: list[tuple[float, float]], cost_weight: float):
    results = [a_setup(str(k), hours, usd) for k, (hours, usd) in enumerate(figures)]
    best, _ = recommend(results, cost_weight)
    hours, usd = figures[int(best.name)]
    assert not any(h < hours and u < usd for h, u in figures)
    # Adding a setup that is worse in both moves nothing.
    worse = a_setup("worse", 2 * max(h for h, _ in figures), 2 * max(u for _, u in figures))
    assert recommend([*results, worse], cost_weight)[0] == best


def test_a_budget_excludes_setups_and_says_when_none_is_left():
    # One in ten runs of "slow" costs more than 110.
    assert recommend(SETUPS, 0.0, usd_max=140)[0].name == "middle"
    assert recommend(SETUPS, 0.0, usd_max=115)[0].name == "slow"
    best, reason = recommend(SETUPS, 0.0, usd_max=105)
    assert best.name == "slow"
    assert reason == ("no setup stays within planning.usd_per_run_max 105; slow, with 20.0 h and $100, is the cheapest")
    none = SetupForecast(name="x", settings={}, refused="usd_per_iteration_max: value 1")
    with pytest.raises(ValueError, match="no setup can be planned: usd_per_iteration_max: value 1"):
        recommend([none], 0.5)
    assert recommend([none, *SETUPS], 1.0)[0].name == "slow"


def test_settings_are_yaml_that_the_configuration_reads_back():
    text = snippet_yaml({"pools.rollout.count": 4, "planning.seeding": "off", "rollout.flush_interval_s": 7.5})
    assert text == "pools:\n  rollout:\n    count: 4\nplanning:\n  seeding: 'off'\nrollout:\n  flush_interval_s: 7.5\n"


@pytest.mark.slow
def test_the_example_moves_its_recommendation_with_the_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Half its responses and few iterations, on the same machines."""
    example = load(EXAMPLE)
    small = replace(
        example,
        run=replace(example.run, num_prompts_per_step=64),
        algorithm=replace(example.algorithm, micro_batch_order="arrival"),
        forecast=replace(example.forecast, iterations=20, widths=(8,)),
    )
    cheap = forecast(small, UNPROBED, created_at_s=0.0)
    assert cheap.recommended != "reserved only"
    best = cheap.setup(cheap.recommended).hours
    assert best is not None
    # By its dollars alone it were 12 s; a lost tail would make an iteration late by more than 2 %.
    assert cheap.snippet["rollout.flush_interval_s"] == pytest.approx(0.02 * best.median * 3600 / 20, abs=0.05)
    # In the plan's order training waits for the first groups, whatever else has ended.
    in_order = forecast(
        replace(small, algorithm=replace(small.algorithm, micro_batch_order="plan")), UNPROBED, created_at_s=0.0
    )
    ordered, arrived = in_order.setup("spot only, 8").hours, cheap.setup("spot only, 8").hours
    assert ordered is not None
    assert arrived is not None
    assert ordered.low > arrived.high
    prices = tmp_path / "prices.yaml"
    own = "{on_demand_usd_per_h: 55.04, spot_usd_per_h: 110, gpus: 8, accelerator: H100-80GB}"
    prices.write_text(f"p5.48xlarge: {own}\n")
    monkeypatch.setenv(PRICES_VARIABLE, str(prices))
    dear = forecast(small, UNPROBED, created_at_s=0.0)
    assert dear.recommended in ("reserved only", "width by cost")
    assert dear.reason != cheap.reason
    assert dear.setup("reserved only") == cheap.setup("reserved only")
