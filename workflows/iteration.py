"""One RL iteration: plan -> (rollout || train) -> conclude.

A configuration is annotated `dict`, not `dict[str, Any]`: Flyte carries the one as JSON, the other as pickles.
"""

import functools
from typing import Any

from flytekit import workflow

from resources.pools import PoolsConfig, RolloutPoolConfig, overrides
from tasks.conclude import conclude
from tasks.configuration.references import IterationOutcome
from tasks.learning.config import TrainerConfig
from tasks.local_map import crew_map
from tasks.plan import plan
from tasks.rollout import rollout
from tasks.train import train


def plan_node(config: dict[str, Any], pools: PoolsConfig, *, after: Any, follows: Any = -1) -> Any:
    """Wire the plan; its reference and its slots by pool. `after` and `follows` are those of the task."""
    planned = plan(config=config, after=after, follows=follows, pools=list(pools.crews))
    return planned.with_overrides(**overrides(pools.control))


def rollout_node(reference: Any, slots: Any, pool: RolloutPoolConfig) -> Any:
    """Wire the members of a crew that are on one kind of machine."""
    crew = crew_map(
        functools.partial(rollout, plan=reference),
        concurrency=pool.concurrency or None,
        local_retries=pool.retries,
    )
    return crew(slot=slots).with_overrides(**overrides(pool))


def rollout_nodes(reference: Any, slots: Any, pools: PoolsConfig) -> list[Any]:
    """Wire the whole crew of a plan, a map for each of its pools, in their order."""
    return [rollout_node(reference, slots[index], pool) for index, pool in enumerate(pools.crews.values())]


def train_node(reference: Any, pools: PoolsConfig, trainer: TrainerConfig) -> Any:
    """Wire the trainer of a plan: a sibling of rollout, never downstream of it, because it follows the journal."""
    if trainer.nnodes * trainer.nproc_per_node == 1:
        return train(plan=reference).with_overrides(**overrides(pools.train))
    from tasks.train_elastic import elastic_trainer  # noqa: PLC0415 - needs the plugin of the extra train-gpu

    task = elastic_trainer(trainer.nnodes, trainer.nproc_per_node)
    return task(plan=reference).with_overrides(**overrides(pools.train))


def conclude_node(reference: Any, outcomes: list[Any], trained: Any, pools: PoolsConfig, *, last: bool) -> Any:
    """Wire the conclusion of a plan, which waits for its rollout on every pool and for its training."""
    concluded = conclude(plan=reference, slots=outcomes[0], trained=trained, last=last)
    for others in outcomes[1:]:
        others >> concluded
    return concluded.with_overrides(**overrides(pools.control))


def iteration_nodes(
    config: dict[str, Any], after: Any, pools: PoolsConfig, trainer: TrainerConfig, *, last: bool
) -> Any:
    """Wire one iteration's nodes; `after` is the iteration that must be concluded first (-1: none).

    train stands after rollout because siblings run in the order of their calls on one machine.
    """
    reference, slots = plan_node(config, pools, after=after)
    outcomes = rollout_nodes(reference, slots, pools)
    trained = train_node(reference, pools, trainer)
    return conclude_node(reference, outcomes, trained, pools, last=last)


@workflow
def iteration(config: dict, after: int = -1) -> IterationOutcome:  # type: ignore[type-arg]
    """Advance a run by one iteration, on the pools that are configured by default.

    Args:
        config: the run's configuration, a YAML or JSON file
        after: the iteration that must be concluded first; only orders
    """
    outcome: IterationOutcome = iteration_nodes(config, after, PoolsConfig(), TrainerConfig(), last=True)
    return outcome
