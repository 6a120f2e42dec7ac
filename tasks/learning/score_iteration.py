"""Scoring an iteration as a machine of `teacher.pool`: the run is opened, the teacher loaded, and a session held."""

import logging
from collections.abc import Callable

from resources.granted import check_granted
from resources.pools import SCORING, pool_path
from storage.clock import Clock
from storage.records import layout, prompt_table
from storage.records.run import connect_to_run, read_plan
from storage.stores.metered import metered
from storage.weights.tensor_sets import published_bytes
from tasks.configuration.iteration_config import config_in_force
from tasks.device.gpu_check import check_gpus
from tasks.learning.beats import repeated
from tasks.learning.ranks import Ranks
from tasks.learning.score_session import ScoreSession
from tasks.learning.trained_model import training_device

log = logging.getLogger(__name__)


def score_iteration(run_url: str, iteration: int, scorer: int, notice: Callable[[], bool], clock: Clock) -> int:
    """Score the finished responses of an iteration as the machine `scorer` of its pool; returns how many.

    Nothing is done if the settings in force name no pool any more. Raises what `ScoreSession.run` raises, WrongGpus,
    and MachineTooSmall in a pod that cannot hold the teachers.
    """
    store = metered(connect_to_run(run_url))
    plan = read_plan(store, iteration)
    config = config_in_force(store, plan)
    teacher = config.teacher
    if teacher is None or teacher.pool is None:
        log.warning("teacher.pool: null is in force for iteration %d; this scorer leaves", iteration)
        return 0
    name, pool = f"{SCORING}{teacher.pool}", config.pools.named(teacher.pool)

    def teachers_bytes() -> int:
        sizes = [published_bytes(store, layout.teacher(name)) for name in teacher.models]
        if teacher.engine == "torch":
            return sum(sizes)
        # One after the other, with a copy in shared memory for vLLM's processes.
        return max(sizes) * (2 if teacher.vllm.process == "own" else 1)

    check_granted(f"scorer {scorer} of iteration {iteration} of {run_url}", name, pool, teachers_bytes, "the teachers")
    check_gpus(pool_path(name), pool.gpus, config.trainer.device)
    session = ScoreSession(
        store,
        plan,
        prompts=prompt_table.read_prompts(store, plan),
        config=config,
        teacher=teacher,
        ranks=Ranks(device=training_device(config.trainer.device)),
        scorer=scorer,
        clock=clock,
        notice=notice,
    )
    # Loading a teacher, or a pass, may take longer than a claim lives.
    interval_s = config.rollout.heartbeat_interval_s
    with repeated(session.beat, interval_s, "scorer", "a scorer's heartbeat could not be written"):
        return session.run()
