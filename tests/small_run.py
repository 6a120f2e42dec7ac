"""A whole run in small and in this process: a tiny random model, a configuration, stores by name, iterations."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from storage.clock import Clock, ManualClock, SystemClock
from storage.journal.assembly import Assembled, JournalReader
from storage.records.records import CONTROL_POOL, ReportRecord, TrainingRecord
from storage.records.run import read_plan
from storage.stores import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectStore, StoreUnavailable
from storage.weights.versions import pull_version
from tasks.configuration.references import PlanReference
from tasks.configuration.run_config import RunConfig, parse
from tasks.learning.train_iteration import train_iteration
from tasks.preparing.iteration import prepare
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.engines.weight_tensors import as_torch
from tasks.sampling.session.member import generate_slot
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

EXECUTION = "test"
# The shorter, the better, graded in this process. A function of the user's own has a process, whose start takes as long
# as a whole step does with a model this small.
SHORTER: list[dict[str, Any]] = [{"function": "length", "arguments": {"free_tokens": 0, "scale_tokens": 40}}]
OWN_REWARD: list[dict[str, Any]] = [{"function": "tests.reward_functions:even_length"}]
# For runs whose responses are not graded: another function has a process, which each plan starts to check it.
NEVER_GRADED: list[dict[str, Any]] = [{"function": "arithmetic"}]
PRICES_USD_PER_H = {"rollout": 1.0, "train": 10.0}


class Unreachable(MemoryStore):
    """A store that does not answer."""

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        raise StoreUnavailable("no answer")


def model_directory(directory: Path) -> Path:
    """A random Qwen2 of one layer with its tokenizer, as a user's model directory."""
    config = tiny_config(hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    return save_tiny_model(directory, tiny_model(config))


def document(url: str, model: Path, **sections: Any) -> dict[str, Any]:
    """A configuration as a user writes it; `sections` replace or extend those of a run of 2 slots and 12 responses."""
    whole: dict[str, Any] = {
        "run": {"url": url, "seed": 3, "num_prompts_per_step": 4, "num_generations": 3},
        "policy": {"path": str(model)},
        "data": {"source": "arithmetic", "limit": 10},
        "rewards": SHORTER,
        "sampling": {"max_completion_length": 40},
        "rollout": {
            "engine": "scripted",
            "flush_interval_s": 1.0,
            "idle_timeout_s": 0.0,
            "weight_cache_bytes_max": 0,
        },
        "optimizer": {"learning_rate": 1e-2},
        "trainer": {"group_timeout_s": 5.0, "micro_batch_tokens_max": 320},
        "pools": {"rollout": {"count": 2, "interruptible": True}},
    }
    if "source" in sections.get("data", {}):
        del whole["data"]["limit"]  # that of the generator
    for name, values in sections.items():
        whole[name] = whole[name] | values if isinstance(values, dict) and name in whole else values
    return whole


def config(url: str, model: Path, **sections: Any) -> RunConfig:
    return parse(document(url, model, **sections))


def memory_store(name: str, store: MemoryStore | None = None) -> ObjectStore:
    """The store at memory://`name` from now on: an empty one, or `store`."""
    connect._memory_stores[name] = MemoryStore(name) if store is None else store
    return connect._memory_stores[name]


def everything(store: ObjectStore) -> dict[str, bytes]:
    """All objects of a store."""
    return {key: store.get(key) for key in store.list("")}


def plan_iteration(settings: RunConfig, clock: Clock | None = None) -> PlanReference:
    reference, _ = prepare(settings, EXECUTION, clock or ManualClock())
    return reference


def roll_out(url: str, iteration: int) -> None:
    """All slots of an iteration but the plan task's, one after another, undisturbed."""
    for slot in read_plan(connect.connect(url), iteration).slots:
        if slot.pool == CONTROL_POOL:
            continue
        generate_slot(url, iteration, slot.slot, lambda: False, SystemClock())


def train_small(url: str, iteration: int) -> TrainingRecord:
    return train_iteration(url, iteration, EXECUTION, SystemClock())


def weights(store: ObjectStore, version: int) -> dict[str, torch.Tensor]:
    """The tensors of a published version by name."""
    _, blocks = pull_version(store, version, None, ManualClock())
    return {name: as_torch(block).clone() for name, block in blocks.items()}


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have equal names, and equal values to the bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def assembled(store: ObjectStore, iteration: int = 0) -> list[Assembled]:
    """Every response of an iteration by number, as the journal has it."""
    plan = read_plan(store, iteration)
    reader = JournalReader(store, plan)
    reader.refresh()
    return [reader.assemble(response) for response in range(plan.num_responses)]


def learned(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without what it took, which is never twice the same, and without the padding, which ranks divide differently."""
    taken = ("timing_s/", "requests/", "padding_share")
    return {name: value for name, value in metrics.items() if not name.startswith(taken)}


def commit_iteration(url: str, iteration: int) -> ReportRecord:
    return conclude_iteration(connect.connect(url), iteration, PRICES_USD_PER_H, SystemClock())
