"""A run of one committed iteration, in memory and in this process, and its evaluations."""

from pathlib import Path

from storage.clock import ManualClock, SystemClock
from tasks.configuration.references import PlanReference
from tasks.configuration.run_config import RunConfig
from tasks.preparing.evaluation import prepare
from tasks.sampling.session.member import generate_slot
from tests.small_run import (
    OWN_REWARD,
    commit_iteration,
    config,
    everything,
    memory_store,
    plan_iteration,
    roll_out,
    train_small,
)

URL = "memory://evaluate"
EVALUATION = {
    "data": {"source": "arithmetic", "limit": 5, "seed": 99},
    "num_generations": 3,
    "sampling": {"max_completion_length": 20, "temperature": 0.7},
    "interval": 2,
}


def trained_run(model: Path) -> dict[str, bytes]:
    """The objects of a run whose first iteration is committed."""
    store = memory_store("evaluate")
    plan_iteration(config(URL, model, rewards=OWN_REWARD))
    roll_out(URL, 0)
    train_small(URL, 0)
    commit_iteration(URL, 0)
    return everything(store)


def planned(settings: RunConfig, version: int = 1) -> tuple[PlanReference, list[int]]:
    return prepare(settings, version, "e1", ManualClock())


def sampled(settings: RunConfig, version: int = 1) -> str:
    """The url of an evaluation whose crew has ended."""
    reference, slots = planned(settings, version)
    for slot in slots:
        generate_slot(reference.run_url, 0, slot, lambda: False, SystemClock())
    return reference.run_url
