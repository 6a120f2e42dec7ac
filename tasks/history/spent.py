"""The cost of a run so far, from its last report, so that not all reports must be read."""

import logging

from storage.records.run import read_report
from storage.stores.store import CorruptObject, ObjectStore

log = logging.getLogger(__name__)

USD_RUN = "cost/usd_run"


def spent_usd(store: ObjectStore, iterations: int) -> float:
    """Dollars of the first `iterations` iterations; raises ObjectMissing if they are not all committed.

    A damaged report is passed over, with what its iteration cost.
    """
    for iteration in range(iterations - 1, -1, -1):
        try:
            return read_report(store, iteration).metrics[USD_RUN]
        except CorruptObject as error:
            log.warning("the dollars of iteration %d are not counted: %s", iteration, error)
    return 0.0
