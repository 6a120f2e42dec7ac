"""What Flyte's path does between a simulated run's iterations: plan the next one, conclude one, and sweep.

The order of steps is that of tasks/preparing/iteration.py and tasks/concluding/iteration.py; what they call is
production's. What reads a user's files is left out: the prompts are those of `undisturbed`, the weights those of
`simulated_step`.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from simulation.simulated_history import STOP_TOKEN, History
from simulation.simulated_step import publish_first
from simulation.undisturbed import prompt
from storage.clock import Clock
from storage.digests import digest_of
from storage.journal.retention import Swept, sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout, prompt_table, records
from storage.records.records import JOINED_POOL, TRAIN_POOL, PlanRecord, SettingsRecord
from storage.records.run import (
    LeaseRecord,
    RunBusy,
    acquire_lease,
    exists,
    next_iteration,
    next_prompt,
    read_plan,
    release_lease,
)
from storage.stores.store import ObjectStore, StoreDenied, StoreUnavailable, commit
from tasks.concluding.iteration import GOODBYE_S, ITERATIONS_SWEPT
from tasks.configuration.iteration_config import settings_of
from tasks.configuration.run_config import RunConfig, dump, parse
from tasks.preparing.iteration import passing_over, sampled_version
from tasks.preparing.needed_state import check_needed_state
from tasks.preparing.written_plan import write_plan
from tasks.reporting.conclusion import conclude_iteration
from tasks.reporting.crew_presence import await_goodbyes

LEASE_TTL_S = 60.0
LEASE_BEAT_S = LEASE_TTL_S / 5
# The later iterations are small, so that a history of several is not several times as long.
LATER_GROUPS_MAX = 3
RETENTION = RetentionConfig(keep_weights=2, keep_checkpoints=1)
PRICES_USD_PER_H: Mapping[str, float] = {"rollout": 1.0, TRAIN_POOL: 8.0, JOINED_POOL: 0.0, "control": 0.1}


def config_of(history: History) -> RunConfig:
    """The configuration of a run whose first plan was drawn."""
    plan = history.plan
    groups = 1 + plan.run_seed % LATER_GROUPS_MAX
    document: dict[str, Any] = {
        "run": {
            "url": "memory://run",
            "seed": plan.run_seed,
            "num_prompts_per_step": groups,
            "num_generations": plan.num_generations,
            "lease_ttl_s": LEASE_TTL_S,
        },
        "policy": {"path": "/nowhere"},
        "data": {"source": "arithmetic"},
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": plan.sampling.max_completion_length},
        "algorithm": {"filter_groups": plan.groups_wanted is not None, "max_staleness": history.ahead},
        "rollout": {"engine": "scripted", "dtype": "float32"},
        "trainer": {"dtype": "float32"},
        "planning": {"seeding": "off"},
        "pools": {"rollout": {"count": groups, "usd_per_hour": 1.0}, "train": {"usd_per_hour": 8.0}},
    }
    return parse(document)


def plan_next(
    store: ObjectStore, first: PlanRecord, config: RunConfig, execution: str, clock: Clock, *, ahead: int = 0
) -> PlanRecord:
    """Write the plan of the next iteration, or return the existing plan.

    first: the drawn plan of the first iteration. ahead: how many planned iterations may be passed over.
    """
    acquire_lease(store, execution, config.run.lease_ttl_s, clock)
    first_open = next_iteration(store)
    check_needed_state(store, config, first_open, execution)
    iteration = passing_over(store, first_open, ahead)
    if not exists(store, layout.plan(iteration)):
        if iteration == 0:
            publish_first(store)
            _write_first(store, first, config, clock)
        else:
            groups = config.run.num_prompts_per_step * (2 if config.algorithm.filter_groups else 1)
            rows = [prompt(group) for group in range(groups)]
            version = sampled_version(store, iteration, config.algorithm.max_staleness if iteration > first_open else 0)
            begins = next_prompt(store, iteration)
            write_plan(store, config, rows, iteration, version, begins, (STOP_TOKEN,), clock)
    settings = SettingsRecord(config=settings_of(config), execution=execution)
    records.put(store, layout.settings(iteration), settings)
    return read_plan(store, iteration)


def _write_first(store: ObjectStore, first: PlanRecord, config: RunConfig, clock: Clock) -> None:
    body = prompt_table.encode_prompts([prompt(group) for group in range(first.num_groups)])
    key = layout.prompts(0, digest_of(body))
    commit(store, key, body)
    plan = replace(first, prompts_key=key, config=dump(config), created_at_s=clock.wall())
    records.commit(store, layout.plan(0), plan)


def conclude(
    store: ObjectStore, iteration: int, flush_interval_s: float, execution: str, clock: Clock, *, last: bool
) -> None:
    """Commit an iteration, release the lease after the last one, and sweep."""
    await_goodbyes(store, read_plan(store, iteration), flush_interval_s + GOODBYE_S, clock)
    conclude_iteration(store, iteration, PRICES_USD_PER_H, clock)
    if last:
        release_lease(store, execution)
    # The iteration is committed; the next conclusion goes on where this sweep ends.
    with suppress(StoreUnavailable, StoreDenied):
        swept_by(store, newest=ITERATIONS_SWEPT)


def takes_lease(store: ObjectStore, execution: str, clock: Clock) -> bool:
    """Another execution tries to advance the run, and gives it up again; returns whether it got the lease."""
    try:
        acquire_lease(store, execution, LEASE_TTL_S, clock)
    except RunBusy:
        return False
    release_lease(store, execution)
    return True


def succeeds_release(store: ObjectStore, execution: str) -> bool:
    """True if the lease was free at the execution's last acquisition: new, or released by its holder."""
    keys = [key for key in store.list(layout.LEASE) if key != layout.LEASE_BEAT]
    log = [records.read(store, LeaseRecord, key) for key in keys]
    got = max(index for index, each in enumerate(log) if each.holder == execution and not each.released)
    return got == 0 or log[got - 1].released


def swept_by(store: ObjectStore, *, newest: int | None = None) -> Swept:
    """Delete what the run no longer needs."""
    return sweep(store, RETENTION, newest=newest)
