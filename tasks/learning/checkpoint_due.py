"""Decides when a trainer stores its state: at an interval, or when replays would cost more than writing.

Without a checkpoint, each later trainer that has lost the state replays, and a replay grows with every iteration. The
rule stores a state as soon as the replays since the last checkpoint, plus a replay now, would take as long as one
writing. Perfect foresight could save at most half of the time that writing and replaying take.
"""

from collections.abc import Sequence

from storage.records import layout, records
from storage.records.records import PlanRecord, TrainingRecord
from storage.records.run import read_settings
from storage.stores.store import ObjectStore
from storage.weights.stored_versions import restored_from
from storage.weights.tensor_sets import WRITE_S, read_manifest
from tasks.configuration.trainer import TrainerConfig

# Of the phases of a host, which keeps the state: how many are assumed to begin without it.
LOST_SHARE = 0.05


def is_checkpoint_due(store: ObjectStore, plan: PlanRecord, trainer: TrainerConfig) -> bool:
    """Whether the trainer of an iteration stores its state; the iteration's training record must be stored already.

    True at the end of an execution, too. The answer depends only on records that exist before the checkpoint.
    """
    version, interval = plan.iteration + 1, trainer.checkpoint_interval
    settings = read_settings(store, plan.iteration)
    if settings is not None and settings.ends_execution:
        return True
    if interval != "auto":
        return version % interval == 0
    newest = restored_from(store, plan.iteration)
    if newest == 0:
        return True
    write_s = read_manifest(store, layout.checkpoint(newest)).metadata.get(WRITE_S)
    trained = [records.read(store, TrainingRecord, layout.training(each)) for each in range(newest, version)]
    phases_s = [record.metrics["timing_s/compute"] for record in trained]
    lost_share = LOST_SHARE if trainer.trained_by_host else 1.0
    return write_s is None or is_worth_writing(phases_s, write_s, lost_share)


def is_worth_writing(phases_s: Sequence[float], write_s: float, lost_share: float = 1.0) -> bool:
    """Whether to write a checkpoint, given the train phases that a replay would have to repeat.

    Args:
        phases_s: Seconds of each train phase since the last checkpoint, oldest first, this state's phase last.
        write_s: Seconds of one writing.
        lost_share: Share of trainers that begin without the state in memory, 0 to 1.
    """
    replays = range(len(phases_s), 0, -1)
    return lost_share * sum(map(float.__mul__, map(float, phases_s), map(float, replays))) >= write_s
