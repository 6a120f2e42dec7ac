"""The cost of a run so far, from its last report, so that not all reports must be read."""

from storage.run import read_report
from storage.store import ObjectStore

USD_RUN = "cost/usd_run"


def spent_usd(store: ObjectStore, iterations: int) -> float:
    """Dollars of the first `iterations` iterations; raises ObjectMissing if they are not all committed."""
    return read_report(store, iterations - 1).metrics[USD_RUN] if iterations else 0.0
