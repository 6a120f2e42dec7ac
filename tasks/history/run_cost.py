"""The cost of a run so far, from the run's last report instead of all reports."""

import logging

from storage.records.run import read_report
from storage.stores.store import CorruptObject, ObjectStore

log = logging.getLogger(__name__)

USD_RUN = "cost/usd_run"


def spent_usd(store: ObjectStore, iterations: int) -> float:
    """Dollars of the first `iterations` iterations; raises ObjectMissing unless all reports are committed.

    A damaged report is passed over, and the cost of its iteration with the report.
    """
    for iteration in range(iterations - 1, -1, -1):
        try:
            return read_report(store, iteration).metrics[USD_RUN]
        except CorruptObject as error:
            log.warning("the dollars of iteration %d are not counted: %s", iteration, error)
    return 0.0
