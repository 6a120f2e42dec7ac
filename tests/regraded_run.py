"""A small trained run with rewards of every kind, to be graded again, and what a grading may do to it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from storage.journal.compaction import read_batches
from storage.records import layout, records
from storage.records.gradings import GradedRecord, read_graded
from storage.records.records import GradedResponse
from storage.records.run import read_plan
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectStore
from tests.small_run import (
    SHORTER,
    commit_iteration,
    config,
    everything,
    memory_store,
    plan_iteration,
    roll_out,
    train_small,
)

# In both signatures, in this process and in processes of their own, with failures, and with what depends on the call.
REWARDS: list[dict[str, Any]] = [
    {"function": "tests.reward_functions:counts_calls", "weight": 0.3},
    {"function": "tests.reward_functions:no_multiples_of_three", "name": "third", "on_failure": -0.7},
    {"function": "tests.reward_functions:characters", "weight": 0.1},
    {"function": "tests.reward_functions:only_even_length", "name": "even", "weight": 1.1},
    {"function": "format", "arguments": {"pattern": ".*1.*"}},
    *SHORTER,
]


def trained(name: str, model: Path, iterations: int, **sections: Any) -> dict[str, bytes]:
    """All objects of a run at memory://`name` with so many committed iterations."""
    store, settings = memory_store(name), config(f"memory://{name}", model, **sections)
    for iteration in range(iterations):
        plan_iteration(settings)
        roll_out(store.url, iteration)
        train_small(store.url, iteration)
        commit_iteration(store.url, iteration)
    return everything(store)


def without_rewards(store: ObjectStore, iterations: int) -> ObjectStore:
    """The run as one whose configuration has `rewards: []`: records have the reward 0, which stands for none."""
    for iteration in range(iterations):
        plan = read_plan(store, iteration)
        records.put(store, layout.plan(iteration), replace(plan, config=plan.config | {"rewards": []}))
    return store


def holding(objects: Mapping[str, bytes], name: str) -> MemoryStore:
    """A store at memory://`name` with copies of the objects."""
    store = MemoryStore(name)
    store._objects.update(objects)
    memory_store(name, store)
    return store


def as_recorded(store: ObjectStore, iteration: int) -> GradedRecord:
    """What a grading with the run's own rewards must be; equal floats have equal bits here, but for 0.0 and -0.0."""
    batches = read_batches(store, iteration)
    graded: list[GradedResponse] = sorted(
        (response for batch in batches for response in batch.graded if response.reward is not None),
        key=lambda response: response.response,
    )
    return GradedRecord(
        iteration=iteration,
        responses=tuple(response.response for response in graded),
        reward=tuple(response.reward for response in graded if response.reward is not None),
        rewards={name: tuple(response.rewards[name] for response in graded) for name in graded[0].rewards},
        reward_errors=tuple(sorted(error for batch in batches for error in batch.reward_errors)),
        given_up=tuple(sorted(reason for batch in batches for reason in batch.given_up)),
    )


def bits(record: GradedRecord) -> str:
    """The record as text, which tells floats of different bits apart, with messages in the order of the alphabet."""
    return repr((record.responses, record.reward, record.rewards, sorted(record.reward_errors), record.given_up))


def differences(before: Mapping[str, bytes], store: ObjectStore, name: str) -> Iterator[str]:
    """What a grading may not do: change or delete an object that was there, or write outside its own folder."""
    after = everything(store)
    for key, body in before.items():
        if after.get(key) != body:
            yield f"{key} is {'gone' if key not in after else 'another'}"
    for key in after.keys() - before.keys():
        if not key.startswith(f"{layout.GRADINGS}{name}/"):
            yield f"{key} is new"


def grades(store: ObjectStore, name: str, iterations: range) -> list[str]:
    """The bits of a grading's iterations."""
    return [bits(read_graded(store, name, iteration)) for iteration in iterations]
