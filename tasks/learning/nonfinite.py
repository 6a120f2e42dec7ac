"""Non-finite steps: keeps in the run why an iteration's training stopped, so that it can be looked at later.

The tokens and log-probs are in the iteration's journal, which stays as long as the iteration is not committed.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from storage import layout, records
from storage.compaction import read_batches
from storage.records import NonFiniteRecord, PlanRecord
from storage.store import ObjectStore, StorageError
from tasks.learning.optimizer import NonFiniteGradient
from tasks.learning.ranks import Ranks

log = logging.getLogger(__name__)


@contextmanager
def keep_nonfinite(store: ObjectStore, plan: PlanRecord) -> Iterator[None]:
    """Write nonfinite.json when the block raises NonFiniteGradient, which then also says how to get at the responses.

    A store that does not take it is only logged: the first error is the one to tell.
    """
    try:
        yield
    except NonFiniteGradient as error:
        key = layout.nonfinite(plan.iteration)
        try:
            store.put(key, records.encode(_record(store, plan, error)))
        except StorageError as failed:
            log.warning("%s could not be written: %s", key, failed)
        command = f"gleaner export {store.url} --rollouts --iterations {plan.iteration} --to FOLDER"
        # Its fields stay, and so does its type: the same error with one more thing to say.
        error.args = (f"{error}; told in {key}, and the tokens and log-probs by: {command}",)
        raise


@contextmanager
def finite_together(ranks: Ranks) -> Iterator[None]:
    """Make NonFiniteGradient of one rank raise on all at the end of the block, with the responses of all.

    Anything else is raised at once, on the rank where it happens: the others may be in the middle of a collective.
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
