"""The draft model of a member's engine: the run's copy, in a folder of this machine."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from storage.records import model_copies
from storage.stores.store import ObjectStore
from tasks.configuration.rollout import RolloutConfig, SpeculationConfig

log = logging.getLogger(__name__)


@contextmanager
def with_draft_model(run: ObjectStore, rollout: RolloutConfig) -> Iterator[RolloutConfig]:
    """The settings of an engine with the folder of the run's draft model as `speculation.draft_model`, in the block.

    Every byte is verified. Without a copy in the run, as in an evaluation with a draft model that no plan had, the
    engine gets no drafts, which changes no token. Raises CorruptObject.
    """
    wanted = rollout.speculation
    if wanted.drafting_model is None:
        yield rollout
        return
    if model_copies.stored(run, wanted.model_copy) is None:
        log.warning(
            "rollout.speculation.draft_model: %s has no copy of %r; decoding without drafts",
            run.url,
            wanted.draft_model,
        )
        yield replace(rollout, speculation=SpeculationConfig())
        return
    # It imports the rewards, which most members need not.
    from tasks.grading.run_rewards import fetched_models  # noqa: PLC0415

    with fetched_models(run, [wanted.model_copy]) as folders:
        folder = str(folders[wanted.model_copy])
        yield replace(rollout, speculation=replace(wanted, draft_model=folder, revision=None))
