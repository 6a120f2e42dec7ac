"""What a run has cost so far, by its last report: nobody reads all of them for it."""

from storage.run import read_report
from storage.store import ObjectStore

USD_RUN = "cost/usd_run"


def spent_usd(store: ObjectStore, iterations: int) -> float:
    """Dollars of the first so many iterations, which are committed; raises ObjectMissing when they are not.

    Reports from before the sum was kept are added up, once: the next report keeps it.
    """
    if not iterations:
        return 0.0
    last = read_report(store, iterations - 1).metrics
    if USD_RUN in last:
        return last[USD_RUN]
    reports = (read_report(store, iteration) for iteration in range(iterations))
    return sum(report.metrics.get("cost/usd_iter", 0.0) for report in reports)
