"""What was not finite: reads the record that a stopped training step left in its run. Never writes."""

from storage.fleet.phase_failure import NonFiniteRecord
from storage.journal.compaction import read_responses
from storage.journal.responses import Response
from storage.records import layout
from storage.records.hints import read_hint
from storage.records.run import next_iteration
from storage.stores.store import ObjectStore


def read_nonfinite(store: ObjectStore, iteration: int) -> NonFiniteRecord | None:
    """Why the last attempt to train an iteration stopped; None if no attempt did, or its record is damaged."""
    return read_hint(store, NonFiniteRecord, layout.nonfinite(iteration))


def nonfinite_responses(store: ObjectStore, iteration: int) -> list[Response]:
    """The responses named in that record, by number, with token ids, log-probs and rewards.

    Raises LookupError if no attempt at the iteration stopped so, and what `read_responses` raises.
    """
    record = read_nonfinite(store, iteration)
    if record is None:
        raise LookupError(f"{store.url} holds no {layout.nonfinite(iteration)}")
    named = set(record.responses)
    return [response for response in read_responses(store, iteration) if response.response in named]


def nonfinite_line(store: ObjectStore) -> str | None:
    """One line about the uncommitted iteration; None if its training did not stop for non-finite values."""
    record = read_nonfinite(store, next_iteration(store))
    if record is None:
        return None
    batches = ", ".join(map(str, record.batches)) or "none"
    return (
        f"iteration {record.iteration}: training stopped: non-finite {record.quantity}, "
        f"{len(record.responses)} responses of micro-batches {batches}, weight version {record.weight_version}; "
        f"gleaner export {store.url} --rollouts --iterations {record.iteration} --to FOLDER"
    )
