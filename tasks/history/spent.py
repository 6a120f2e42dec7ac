"""The cost of a run so far, from its last report, so that not all reports must be read."""

from storage.run import read_report
from storage.store import ObjectStore

USD_RUN = "cost/usd_run"


def spent_usd(store: ObjectStore, iterations: int) -> float:
    """Dollars of the first `iterations` iterations; raises ObjectMissing if they are not all committed.

    Reports from before the sum was kept are added up once: the next report keeps the sum.
    """
    if not iterations:
        return 0.0
    last = read_report(store, iterations - 1).metrics
    if USD_RUN in last:
        return last[USD_RUN]
    reports = (read_report(store, iteration) for iteration in range(iterations))
    return sum(report.metrics.get("cost/usd_iter", 0.0) for report in reports)
