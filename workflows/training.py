"""Training: iterations in a row, continuing a run where it stands.

With algorithm.max_staleness the next iteration is rolled out while this one is trained on.
"""

from typing import Any

from flytekit import dynamic, workflow

from tasks.configuration.references import IterationOutcome
from tasks.configuration.run_config import RunConfig, parse
from workflows.evaluation import evaluation_ahead, evaluation_behind
from workflows.iteration import conclude_node, plan_node, rollout_nodes, train_node


@dynamic
def iterations(config: dict, count: int) -> list[IterationOutcome]:  # type: ignore[type-arg]
    """Chain `count` iterations of the run, on the pools its configuration names."""
    settings = parse(config)
    chain = one_step_off if settings.algorithm.max_staleness else one_by_one
    return chain(config, count, settings)


def one_by_one(config: dict[str, Any], count: int, settings: RunConfig) -> list[Any]:
    """An iteration begins when the one before is concluded: it samples from the newest weights."""
    pools = settings.pools
    outcomes: list[Any] = []
    after: Any = -1
    for step in range(count):
        reference, slots = plan_node(config, pools, after=after)
        if not outcomes:
            evaluation_ahead(config, reference, pools)
        rolled_out = rollout_nodes(reference, slots, pools)
        trained = train_node(reference, pools, settings.trainer)
        outcome = conclude_node(reference, rolled_out, trained, pools, last=step == count - 1)
        evaluation_behind(config, outcome, pools)
        after = outcome.iteration
        outcomes.append(outcome)
    return outcomes


def one_step_off(config: dict[str, Any], count: int, settings: RunConfig) -> list[Any]:
    """Iteration n + 1 is planned when n - 1 is concluded, and rolled out while n is trained on: from weights n.

    The one-step asynchronous pipeline of StreamRL (arXiv 2504.15930). The first iteration is on-policy, unless an
    execution before had planned it already. There is one crew at a time, and one trainer: rollouts on a pool wait for
    each other, trainers too, and so do conclusions. On one machine, where nodes run in the order of their calls, the
    plans come before the trainers that would give them newer weights. Where the next plan is refused for its cost, this
    iteration stands twice in the chain, so that it is trained and concluded first; the second time does nothing.
    """
    pools = settings.pools
    outcomes: list[Any] = []
    reference, slots = plan_node(config, pools, after=-1)
    evaluation_ahead(config, reference, pools)
    # (rolled out on each pool, trained, concluded) of the iteration before.
    before: tuple[Any, ...] = ()
    for step in range(count):
        rolled_out = rollout_nodes(reference, slots, pools)
        planned = None
        if step < count - 1:
            after = outcomes[-1].iteration if outcomes else -1
            planned = plan_node(config, pools, after=after, follows=reference.iteration)
        trained = train_node(reference, pools, settings.trainer)
        concluded = conclude_node(reference, rolled_out, trained, pools, last=planned is None)
        now = (*rolled_out, trained, concluded)
        for earlier, later in zip(before, now, strict=False):
            earlier >> later
        before = now
        evaluation_behind(config, concluded, pools)
        outcomes.append(concluded)
        if planned is not None:
            reference, slots = planned
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
