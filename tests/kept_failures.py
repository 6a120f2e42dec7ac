"""Failures of slots, kept in a run as the rollout task keeps them."""

from storage.records.failures import FailureRecord, keep_failure
from storage.stores.store import ObjectStore


def keep_slot(
    store: ObjectStore, iteration: int, execution: str, slot: int, error: str, *, host: str = "m", at_s: float = 1.0
) -> None:
    failure = FailureRecord(
        task="rollout", iteration=iteration, execution=execution, slot=slot, host=host, error=error, at_s=at_s
    )
    keep_failure(store, failure)
