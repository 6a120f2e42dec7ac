"""Dollars of a run, by its last report."""

from dataclasses import replace

import pytest

from storage.records import layout, records
from storage.stores.store import ObjectMissing
from tasks.history.run_cost import spent_usd
from tests.tasks.reporting.test_conclusion import an_iteration, conclude


def test_dollars_of_the_run_add_up_from_report_to_report():
    store = an_iteration()
    first = conclude(store)
    assert spent_usd(store, 0) == 0.0
    assert spent_usd(store, 1) == first.metrics["cost/usd_iter"]
    records.put(store, layout.report(1), replace(first, iteration=1, metrics={"cost/usd_run": 9.0}))
    assert spent_usd(store, 2) == 9.0


def test_iterations_that_are_not_concluded_have_no_known_cost():
    with pytest.raises(ObjectMissing):
        spent_usd(an_iteration(), 1)
