"""Whether a trainer is to store its state: at an interval, or when replaying would cost more than writing.

A checkpoint that is left out costs each later trainer that has not the state in memory a replay, which grows with every
iteration. So a state is stored when what these replays have cost since the last one, and would cost now, reaches the
time of one writing. Hindsight could save at most half of the time that this takes.
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
    """Whether the trainer of an iteration, whose training record is stored, is to store its state.

    It is at the end of an execution, too. The answer follows from what is stored before that state.
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
    """Whether to write a state that lacks a checkpoint of itself and of the versions before it.

    Args:
        phases_s: Seconds of each train phase since the last checkpoint, the oldest first; that of this state is last.
        write_s: Seconds that writing takes.
        lost_share: Of the trainers, how many have not the state in memory.
    """
    replays = range(len(phases_s), 0, -1)
    return lost_share * sum(map(float.__mul__, map(float, phases_s), map(float, replays))) >= write_s
