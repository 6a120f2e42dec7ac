"""Training: iterations in a row, continuing a run where it stands."""

from typing import Any

from flytekit import dynamic, workflow

from tasks.configuration.references import IterationOutcome
from tasks.configuration.run_config import parse
from workflows.iteration import iteration_nodes


@dynamic
def iterations(config: dict, count: int) -> list[IterationOutcome]:  # type: ignore[type-arg]
    """Chain `count` iterations of the run, on the pools its configuration names."""
    pools = parse(config).pools
    outcomes: list[Any] = []
    after: Any = -1
    for step in range(count):
        outcome = iteration_nodes(config, after, pools, last=step == count - 1)
        after = outcome.iteration
        outcomes.append(outcome)
    return outcomes


@workflow
def training(config: dict = {}, count: int = 1) -> list[IterationOutcome]:  # type: ignore[type-arg]  # noqa: B006
    """Train a policy with GRPO for `count` iterations more, from where the run stands.

    Args:
        config: the run's configuration, a YAML or JSON file (see examples/)
        count: how many iterations to add
    """
    outcome: list[IterationOutcome] = iterations(config=config, count=count)
    return outcome
