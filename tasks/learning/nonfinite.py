"""Non-finite steps: a record in the run of why an iteration's training stopped, for a later investigation.

The tokens and log-probs are in the iteration's journal, which is kept until the iteration is committed.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from storage.fleet.phase_failure import NonFiniteRecord
from storage.journal.compaction import read_batches
from storage.records import layout, records
from storage.records.records import PlanRecord
from storage.stores.store import ObjectStore, StorageError
from tasks.learning.optimizer import NonFiniteGradient
from tasks.learning.ranks import Ranks

log = logging.getLogger(__name__)


@contextmanager
def keep_nonfinite(store: ObjectStore, plan: PlanRecord) -> Iterator[None]:
    """When the block raises NonFiniteGradient, write nonfinite.json and add to the message how to get the responses.

    A failure of the store is only logged, because NonFiniteGradient is the error to report.
    """
    try:
        yield
    except NonFiniteGradient as error:
        key = layout.nonfinite(plan.iteration)
        try:
            records.put(store, key, _record(store, plan, error))
        except StorageError as failed:
            log.warning("%s could not be written: %s", key, failed)
        command = f"gleaner export {store.url} --rollouts --iterations {plan.iteration} --to FOLDER"
        # The same error object is raised again, so its type and fields stay; only its message is longer.
        error.args = (f"{error}; it is recorded in {key}; get its tokens and log-probs by: {command}",)
        raise


@contextmanager
def finite_together(ranks: Ranks) -> Iterator[None]:
    """Raise NonFiniteGradient on every rank at the end of the block if any rank raised it; names the responses of all.

    Any other error is raised at once, only on the rank where it happens: the remaining ranks may be in a collective.
    """
    found: NonFiniteGradient | None = None
    try:
        yield
    except NonFiniteGradient as error:
        found = error
    told = ranks.gather(None if found is None else [found.quantity, list(found.responses)])
    failed = [each for each in told if each is not None]
    if failed:
        responses = {response for _, named in failed for response in named}
        raise NonFiniteGradient(failed[0][0], sorted(responses)) from found


def _record(store: ObjectStore, plan: PlanRecord, error: NonFiniteGradient) -> NonFiniteRecord:
    responses = set(error.responses)
    batches = read_batches(store, plan.iteration)
    return NonFiniteRecord(
        iteration=plan.iteration,
        quantity=error.quantity,
        responses=error.responses,
        batches=tuple(b.number for b in batches if responses & {graded.response for graded in b.responses}),
        weight_version=plan.weight_version,
        message=str(error),
    )
