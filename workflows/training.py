"""Training: chains iterations, and continues a run where it stands.

With algorithm.max_staleness the next iteration is rolled out while this one is trained.
"""

import functools
from typing import Any

from flytekit import dynamic, workflow

from resources.pools import ControlPoolConfig, task_settings
from tasks.configuration.references import IterationOutcome
from tasks.configuration.run_config import RunConfig, parse
from workflows.compiled_size import check_size
from workflows.evaluation import evaluation_ahead, evaluation_behind
from workflows.iteration import conclude_node, plan_node, rollout_nodes, train_node
from workflows.node_names import NodeNames


@dynamic(**task_settings(ControlPoolConfig()))
def iterations(config: dict, count: int) -> list[IterationOutcome]:  # type: ignore[type-arg]
    """Chain `count` iterations of the run, on the pools that its configuration names."""
    settings = parse(config)
    chain = functools.partial(one_step_off if settings.algorithm.max_staleness else one_by_one, config, settings)
    check_size(chain, count)
    return chain(count)


def one_by_one(config: dict[str, Any], settings: RunConfig, count: int) -> list[Any]:
    """Chain iterations that each begin when the previous one is concluded, and so sample from the newest weights.

    The spine is plan -> train -> conclude -> next plan.
    """
    pools = settings.pools
    outcomes: list[Any] = []
    for number in range(1, count + 1):
        names = NodeNames.of_iteration(number, count)
        after = outcomes[-1].iteration if outcomes else -1
        reference, slots, _ = plan_node(config, pools, names, after=after)
        if number == 1:
            evaluation_ahead(config, reference, pools, count)
        rollout_nodes(reference, slots, pools, names)
        trained = train_node(reference, pools, settings.trainer, names)
        outcomes.append(conclude_node(trained, pools, names, last=number == count))
        evaluation_behind(config, outcomes[-1], pools, names)
    return outcomes


def one_step_off(config: dict[str, Any], settings: RunConfig, count: int) -> list[Any]:
    """Chain iterations: n + 1 is planned when n - 1 is concluded, and rolled out from weights n while n is trained.

    This is the one-step asynchronous pipeline of StreamRL (arXiv 2504.15930). The first iteration is on-policy, unless
    an earlier execution had already planned it. The spine is next plan -> train -> conclude -> the plan after the next:
    the plan of n + 1 says that n is to be trained now. On one machine, where nodes run in the order of their calls, the
    plans come before the trainers that would give them newer weights. If a plan is refused for its cost, what was
    planned before is trained and concluded first.
    """
    pools = settings.pools
    outcomes: list[Any] = []
    names = NodeNames.of_iteration(1, count)
    reference, slots, _ = plan_node(config, pools, names, after=-1)
    evaluation_ahead(config, reference, pools, count)
    for number in range(1, count + 1):
        rollout_nodes(reference, slots, pools, names)
        after, to_train, of_next = outcomes[-1] if outcomes else None, reference, names
        if number < count:
            of_next = NodeNames.of_iteration(number + 1, count)
            # The first two plans follow each other; after that each plan follows a conclusion.
            behind = reference.iteration if after is None else after.iteration
            reference, slots, to_train = plan_node(config, pools, of_next, after=behind, ahead=1)
        trained = train_node(to_train, pools, settings.trainer, names)
        if number == count and after is not None:
            after >> trained
        outcomes.append(conclude_node(trained, pools, names, last=number == count))
        evaluation_behind(config, outcomes[-1], pools, names)
        names = of_next
    return outcomes


@workflow
def training(config: dict = {}, count: int = 1) -> list[IterationOutcome]:  # type: ignore[type-arg]  # noqa: B006
    """Train a policy with GRPO for `count` more iterations, from where the run stands.

    Args:
        config: the run's configuration, a YAML or JSON file (see examples/)
        count: how many iterations to add
    """
    outcome: list[IterationOutcome] = iterations(config=config, count=count)
    return outcome
