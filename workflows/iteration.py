"""One RL iteration: plan -> (rollout || train) -> conclude.

A configuration is annotated `dict`, not `dict[str, Any]`: Flyte carries the one as JSON, the other as pickles.
"""

import functools
from typing import Any

from flytekit import workflow

from resources.pools import PoolsConfig, overrides
from tasks.conclude import conclude
from tasks.configuration.references import IterationOutcome
from tasks.learning.config import TrainerConfig
from tasks.local_map import crew_map
from tasks.plan import plan
from tasks.rollout import rollout
from tasks.train import train


def plan_node(config: dict[str, Any], pools: PoolsConfig, *, after: Any, follows: Any = -1) -> Any:
    """Wire the plan; its reference and its slots. `after` and `follows` are those of the task."""
    return plan(config=config, after=after, follows=follows).with_overrides(**overrides(pools.control))


def rollout_node(reference: Any, slots: Any, pools: PoolsConfig) -> Any:
    """Wire the crew of a plan."""
    crew = crew_map(
        functools.partial(rollout, plan=reference),
        concurrency=pools.rollout.concurrency or None,
        local_retries=pools.rollout.retries,
    )
    return crew(slot=slots).with_overrides(**overrides(pools.rollout))


def train_node(reference: Any, pools: PoolsConfig, trainer: TrainerConfig) -> Any:
    """Wire the trainer of a plan: a sibling of rollout, never downstream of it, because it follows the journal."""
    if trainer.nnodes * trainer.nproc_per_node == 1:
        return train(plan=reference).with_overrides(**overrides(pools.train))
    from tasks.train_elastic import elastic_trainer  # noqa: PLC0415 - needs the plugin of the extra train-gpu

    task = elastic_trainer(trainer.nnodes, trainer.nproc_per_node)
    return task(plan=reference).with_overrides(**overrides(pools.train))


def conclude_node(reference: Any, outcomes: Any, trained: Any, pools: PoolsConfig, *, last: bool) -> Any:
    """Wire the conclusion of a plan, which waits for its rollout and its training."""
    concluded = conclude(plan=reference, slots=outcomes, trained=trained, last=last)
    return concluded.with_overrides(**overrides(pools.control))


def iteration_nodes(
    config: dict[str, Any], after: Any, pools: PoolsConfig, trainer: TrainerConfig, *, last: bool
) -> Any:
    """Wire one iteration's nodes; `after` is the iteration that must be concluded first (-1: none).

    train stands after rollout because siblings run in the order of their calls on one machine.
    """
    reference, slots = plan_node(config, pools, after=after)
    outcomes = rollout_node(reference, slots, pools)
    trained = train_node(reference, pools, trainer)
    return conclude_node(reference, outcomes, trained, pools, last=last)


@workflow
def iteration(config: dict, after: int = -1) -> IterationOutcome:  # type: ignore[type-arg]
    """Advance a run by one iteration.

    Args:
        config: the run's configuration, a YAML or JSON file
        after: the iteration that must be concluded first; only orders
    """
    outcome: IterationOutcome = iteration_nodes(config, after, PoolsConfig(), TrainerConfig(), last=True)
    return outcome
