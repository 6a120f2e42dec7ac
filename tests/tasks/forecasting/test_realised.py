from dataclasses import replace
from typing import Any

import pytest

from storage.records import layout, records
from storage.records.forecast_records import ForecastRecord, SetupForecast
from storage.records.records import PlanRecord, ReportRecord, SamplingParams
from storage.stores.memory import MemoryStore
from tasks.forecasting.realised import compare, save_forecast
from tasks.forecasting.table import comparison_text
from tests.committed_runs import begin
from tests.forecast_documents import a_setup, spread

SETTINGS: dict[str, Any] = {"pools.rollout.count": 2, "pools.rollout.count_min": 1, "planning.width": "fixed"}
CONFIGURATION = {"pools": {"rollout": {"count": 2, "count_min": 0}, "more_rollout": {}}, "planning": {"width": "fixed"}}


def forecast(*setups: SetupForecast, created_at_s: float = 100.0) -> ForecastRecord:
    return ForecastRecord(
        created_at_s=created_at_s,
        iterations=10,
        iterations_simulated=5,
        seeds=2,
        inputs=(),
        setups=setups,
        recommended=setups[0].name,
        reason="",
        snippet={},
    )


def commit(store: MemoryStore, iteration: int, *, began_s: float, duration_s: float = 360.0, usd: float = 2.0) -> None:
    begin(store, config=CONFIGURATION)
    plan = PlanRecord(
        iteration=iteration,
        weight_version=iteration,
        run_seed=0,
        num_generations=2,
        prompts_key="",
        first_prompt=0,
        slots=(),
        sampling=SamplingParams(),
        config=CONFIGURATION,
        created_at_s=began_s,
    )
    report = ReportRecord(
        iteration=iteration,
        weight_version=iteration + 1,
        next_prompt=0,
        metrics={"num_tokens": 36_000.0, "timing_s/iteration": duration_s, "cost/usd_iter": usd},
        rewards=(),
        lengths=(),
        lives=(),
        train_started_at_s=began_s,
        train_ended_at_s=began_s,
        created_at_s=began_s + duration_s,
    )
    records.commit(store, layout.plan(iteration), plan)
    records.commit(store, layout.report(iteration), report)


def figures(store: MemoryStore) -> dict[str, tuple[float, float, bool]]:
    """By name: what happened, the error, whether within the interval."""
    return {row.name: (row.realised, row.error, row.within) for row in compare(store).rows}


def test_errors_are_those_of_the_median_against_what_happened():
    store = MemoryStore("run")
    # 10 iterations in 1.2 h for $18: 432 s and $1.80 each, +-10 %.
    save_forecast(store, forecast(a_setup("two", 1.2, 18.0, **SETTINGS)))
    commit(store, 0, began_s=200.0)
    commit(store, 1, began_s=600.0, duration_s=400.0, usd=1.8)
    found = figures(store)
    assert found["hours"] == (pytest.approx(380 / 3600), pytest.approx(432 / 380 - 1), False)
    assert found["dollars"] == (pytest.approx(1.9), pytest.approx(1.8 / 1.9 - 1), True)
    assert found["tokens/s"][0] == pytest.approx(72_000 / 760)
    assert found["$ per million tokens"][0] == pytest.approx(3.8 / 0.072)
    comparison = compare(store)
    assert (comparison.setup, comparison.is_same_setup, comparison.iterations) == ("two", True, 2)
    text = comparison_text(comparison)
    assert "2 iterations against the forecast for 'two'" in text
    assert "-5.3%" in text
    assert "none of those" not in text


def test_dollars_are_held_against_those_that_reports_can_tell():
    store = MemoryStore("run")
    told = replace(a_setup("two", 1.0, 30.0, **SETTINGS), usd_reported=spread(20.0), usd_per_mtok_reported=spread(54.0))
    save_forecast(store, forecast(told))
    commit(store, 0, began_s=200.0)
    found = figures(store)
    assert found["dollars"] == (2.0, pytest.approx(0.0), True)
    assert found["$ per million tokens"] == (pytest.approx(2.0 / 0.036), pytest.approx(54 * 0.018 - 1), True)


def test_iterations_that_overlap_count_once_and_pauses_not_at_all():
    store = MemoryStore("run")
    save_forecast(store, forecast(a_setup("two", 1.0, 20.0, **SETTINGS)))
    commit(store, 0, began_s=200.0)
    commit(store, 1, began_s=400.0)
    commit(store, 2, began_s=9000.0)
    assert figures(store)["hours"][0] == pytest.approx((360 + 200 + 360) / 3 / 3600)


def test_only_iterations_after_the_forecast_count():
    store = MemoryStore("run")
    commit(store, 0, began_s=0.0, usd=9.0)
    save_forecast(store, forecast(a_setup("two", 1.0, 20.0, **SETTINGS)))
    with pytest.raises(LookupError, match="holds no iteration that was begun after the forecast"):
        compare(store)
    commit(store, 1, began_s=400.0, usd=2.0)
    # Newer, and nothing was committed since.
    save_forecast(store, forecast(a_setup("two", 1.0, 99.0, **SETTINGS), created_at_s=5000.0))
    assert figures(store)["dollars"] == (2.0, 0.0, True)


def test_the_runs_own_setup_is_found_among_those_that_were_forecast():
    store = MemoryStore("run")
    others = (
        a_setup("as configured", 1.0, 10.0, **{**SETTINGS, "pools.rollout.count": 3}),
        a_setup("other pools", 1.0, 10.0, **SETTINGS, **{"pools.more_rollout.far.count": 1}),
        a_setup("cost", 1.0, 10.0, **{**SETTINGS, "planning.width": "cost"}),
    )
    save_forecast(store, forecast(*others, a_setup("two", 1.0, 20.0, **SETTINGS)))
    commit(store, 0, began_s=200.0)
    assert compare(store).setup == "two"
    another = MemoryStore("another")
    save_forecast(another, forecast(*others))
    commit(another, 0, began_s=200.0)
    comparison = compare(another)
    assert (comparison.setup, comparison.is_same_setup) == ("as configured", False)
    assert "not among the forecast ones" in " ".join(comparison_text(comparison).split())


def test_nothing_to_compare_is_said():
    with pytest.raises(LookupError, match="holds no forecast; make one with"):
        compare(MemoryStore("run"))
    store = MemoryStore("run")
    save_forecast(store, forecast(SetupForecast(name="as configured", settings={}, refused="dear")))
    commit(store, 0, began_s=200.0)
    with pytest.raises(LookupError, match="holds no figures for the run's setup"):
        compare(store)


def test_a_forecast_is_written_once_under_its_digest():
    store = MemoryStore("run")
    record = forecast(a_setup("two", 1.0, 20.0, **SETTINGS))
    assert save_forecast(store, record) == save_forecast(store, record)
    save_forecast(store, replace(record, seeds=3))
    keys = list(store.list(layout.FORECASTS))
    assert len(keys) == 2
    assert record in [records.read(store, ForecastRecord, key) for key in keys]
