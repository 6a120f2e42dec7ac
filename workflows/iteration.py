"""One RL iteration: plan -> (rollout || train) -> conclude.

A configuration is annotated `dict`, not `dict[str, Any]`: Flyte carries the one as JSON, the other as pickles.
"""

import functools
from typing import Any

from flytekit import workflow

from resources.pools import PoolsConfig, overrides
from tasks.conclude import conclude
from tasks.configuration.references import IterationOutcome
from tasks.local_map import crew_map
from tasks.plan import plan
from tasks.rollout import rollout
from tasks.train import train


def iteration_nodes(config: dict[str, Any], after: Any, pools: PoolsConfig, *, last: bool) -> Any:
    """Wire one iteration's nodes; `after` is the iteration that must be concluded first (-1: none).

    train is a sibling of rollout, never downstream of it: it follows the journal. It stands after rollout because
    siblings run in the order of their calls on one machine.
    """
    control = overrides(pools.control)
    reference, slots = plan(config=config, after=after).with_overrides(**control)
    crew = crew_map(
        functools.partial(rollout, plan=reference),
        concurrency=pools.rollout.concurrency or None,
        local_retries=pools.rollout.retries,
    )
    outcomes = crew(slot=slots).with_overrides(**overrides(pools.rollout))
    trained = train(plan=reference).with_overrides(**overrides(pools.train))
    return conclude(plan=reference, slots=outcomes, trained=trained, last=last).with_overrides(**control)


@workflow
def iteration(config: dict, after: int = -1) -> IterationOutcome:  # type: ignore[type-arg]
    """Advance a run by one iteration.

    Args:
        config: the run's configuration, a YAML or JSON file
        after: the iteration that must be concluded first; only orders
    """
    outcome: IterationOutcome = iteration_nodes(config, after, PoolsConfig(), last=True)
    return outcome
