"""Trains an iteration on this machine: in the calling process, or in several ranks as child processes.

Ranks of several machines are started by torch's elastic launcher instead (`tasks/train_elastic.py`).
"""

from pathlib import Path

from resources.work_log import at_work
from storage.clock import Clock
from storage.records import layout, records
from storage.records.records import TrainingRecord
from storage.records.run import connect_to_run, read_plan
from storage.stores.store import StoreUnavailable
from tasks.configuration.iteration_config import config_in_force
from tasks.device.gpu_check import WrongNode
from tasks.learning.rank_ends import RanksFailed
from tasks.learning.started_ranks import StartedRanks
from tasks.sampling.engines.engine import EngineDied

PROGRAM = Path(__file__).with_name("training_rank.py")
# What `train_iteration` raises where another attempt may help.
MAY_PASS = (StoreUnavailable, EngineDied, WrongNode)
# Arrow imports pandas for its first array.
IMPORTS = ("tasks.learning.train_iteration", "transformers.modeling_utils", "pandas")


def train_here(run_url: str, iteration: int, execution: str, clock: Clock) -> TrainingRecord:
    """Call `tasks.learning.train_iteration` in this process, or with trainer.nproc_per_node above 1 in every rank.

    Raises the errors of `train_iteration`, or RanksFailed.
    """
    store = connect_to_run(run_url)
    count = config_in_force(store, read_plan(store, iteration)).trainer.nproc_per_node
    if count == 1:
        from tasks.learning.train_iteration import train_iteration  # noqa: PLC0415 - ranks import torch, and this process need not

        return train_iteration(run_url, iteration, execution, clock)
    at_work(f"{count} ranks train; rank 0 says how far they are")
    with StartedRanks(PROGRAM, [run_url, str(iteration), execution], IMPORTS, count, None, lambda _: None) as ranks:
        failure = ranks.wait()
    if failure is not None:
        raise RanksFailed(failure)
    return records.read(store, TrainingRecord, layout.training(iteration))
