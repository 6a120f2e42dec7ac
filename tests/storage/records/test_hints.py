"""Records that only measure: a damaged one is said in one line, and nothing waits for it."""

from dataclasses import replace

import pytest

from storage.records import layout, records
from storage.records.hints import collected
from storage.records.records import ReportRecord
from storage.records.run import read_report
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from tasks.history.planning_inputs import recent_reports
from tasks.history.run_cost import USD_RUN, spent_usd
from tasks.reporting.metrics_lines import write_metrics
from tasks.reporting.nonfinite import nonfinite_line
from tests.committed_runs import run_of
from tests.tasks.reporting.test_conclusion import an_iteration, conclude

DAMAGES = [b"", b"damaged", b"{}", b'{"body":{},"digest":"', b"\xff" * 7]


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_iteration_is_concluded_though_the_collectors_record_is_damaged(damage, caplog):
    store = an_iteration()
    whole = conclude(an_iteration())
    store.put(layout.collected(0), damage)
    report = conclude(store)
    assert report.metrics == whole.metrics
    assert isinstance(report, ReportRecord)
    assert collected(store, 0) is None
    assert "a measurement is passed over: object 'iterations/000000/collected.json' is corrupt" in caplog.text


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_of_a_stopped_step_hides_no_status(damage, caplog):
    store = MemoryStore("hints")
    run_of(store, 1)
    store.put(layout.nonfinite(1), damage)
    assert nonfinite_line(store) is None
    assert "is passed over" in caplog.text


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_report_of_the_past_is_no_measurement_of_it(damage, caplog):
    store = MemoryStore("reports")
    run_of(store, 3)
    for number in range(3):
        report = read_report(store, number)
        costs = report.metrics | {USD_RUN: float(number + 1)}
        records.put(store, layout.report(number), replace(report, metrics=costs))
    store.put(layout.report(1), damage)
    assert [report.iteration for report in recent_reports(store, 3)] == [2, 0]
    assert spent_usd(store, 2) == spent_usd(store, 1) == 1.0
    assert spent_usd(store, 3) == 3.0
    assert "the dollars of iteration 1 are not counted" in caplog.text
    with pytest.raises(CorruptObject):
        write_metrics(store)
