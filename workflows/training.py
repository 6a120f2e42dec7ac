"""Training: chains iterations, and continues a run where it stands.

With algorithm.max_staleness further iterations are rolled out while this one is trained.
"""

import functools
import os
from typing import Any

from flytekit import dynamic, workflow

from resources.package_code import code_digest
from resources.pools import ControlPoolConfig, task_settings
from tasks.configuration.references import IterationOutcome
from tasks.configuration.run_config import RunConfig, parse, settings_digest
from tasks.local_map import import_ahead
from tasks.reporting.interruption import announced_interruption
from tasks.rollout import IMPORTS
from tasks.task_log import check_code, logged_wiring
from workflows.compiled_size import check_size
from workflows.config_input import Configuration
from workflows.count import Count
from workflows.evaluation import end_node, evaluates, evaluation_beside
from workflows.iteration import (
    conclude_node,
    plan_node,
    rollout_nodes,
    scoring_nodes,
    standing_nodes,
    standing_trainer_node,
    train_node,
)
from workflows.node_names import NodeNames


@dynamic(**task_settings(ControlPoolConfig()))
def iterations(config: dict, count: Count, code: str = "") -> IterationOutcome:  # type: ignore[type-arg]
    """Chain `count` iterations of the run, on the pools that its configuration names; returns the last one.

    code: the digest of the code with which the execution was registered; pods that have other code refuse to work.
    """
    check_code("iterations", code)
    settings = parse(config)
    # `gleaner check` says the same of a file.
    version = os.environ.get("FLYTE_INTERNAL_TASK_VERSION", "unknown")
    what = f"{count} iterations with settings {settings_digest(settings)}, version {version}"
    chain = functools.partial(chained, config, settings, code=code)
    wired = logged_wiring(f"run {settings.run.url}", what, count)
    with wired, announced_interruption(settings.run.url, count):
        check_size(chain, count)
        if any(pool.count for pool in settings.pools.rollout_pools.values()):
            import_ahead(IMPORTS)
        outcome: IterationOutcome = chain(count)[-1]
    return outcome


def chained(config: dict[str, Any], settings: RunConfig, count: int, *, code: str) -> list[Any]:
    """Chain iterations along one path, with max_staleness s: n + s is planned when n - 1 is concluded.

    If s is 0, the path is plan -> train -> conclude -> next plan, and each iteration samples from the newest weights.
    Else s iterations are rolled out ahead of training, from weights that are up to s versions old, as in the one-step
    asynchronous pipeline of StreamRL (arXiv 2504.15930). The path then begins with s + 1 plans and goes on with train
    -> conclude -> the plan of s iterations later, which says which iteration is to be trained now. The first iteration
    is on-policy, unless an earlier execution had already planned it. If a plan is refused for its cost, what was
    planned before is trained and concluded first.

    On one machine, where nodes run in the order of their calls, the plans come before the trainers that would give them
    newer weights.
    """
    pools, ahead = settings.pools, settings.algorithm.max_staleness
    stands = settings.rollout.crew == "standing"
    names = [NodeNames.of_iteration(number, count, settings.run.url) for number in range(1, count + 1)]
    planned: list[tuple[Any, Any, Any]] = []
    outcomes: list[Any] = []
    with_evaluations = evaluates(settings)

    def plan_next(after: Any) -> Any:
        """Wire the next plan; returns the reference of the iteration to train then."""
        passed_over, last = min(len(planned), ahead), len(planned) == count - 1
        reference, slots, to_train, *evaluation = plan_node(
            config,
            pools,
            names[len(planned)],
            after=after,
            ahead=passed_over,
            last=last,
            code=code,
            evaluates=with_evaluations and not planned,
        )
        planned.append((reference, slots, evaluation))
        return to_train

    to_train = plan_next(-1)
    first, _, evaluation = planned[0]
    evaluated = evaluation_beside(settings, evaluation, NodeNames.of_iteration(0, count, settings.run.url))
    of_execution = NodeNames.of_execution(count, settings.run.url)
    standing_trainer_node(first, pools, settings.trainer, count, of_execution)
    if stands:
        standing_nodes(first, pools, count, of_execution)
    for index in range(count):
        scoring_nodes(planned[index][0], settings, names[index])
        if not stands:
            rollout_nodes(*planned[index][:2], pools, names[index])
        while not outcomes and len(planned) < min(1 + ahead, count):
            to_train = plan_next(planned[-1][0].iteration)
        follows_plan = index == 0 or index + ahead < count
        trained = train_node(to_train if follows_plan else planned[index][0], pools, settings.trainer, names[index])
        if not follows_plan:
            outcomes[-1] >> trained
        outcome, *evaluation = conclude_node(
            trained, pools, names[index], last=index == count - 1, config=config if with_evaluations else {}
        )
        outcomes.append(outcome)
        evaluated += evaluation_beside(settings, evaluation, names[index])
        if len(planned) < count:
            to_train = plan_next(outcomes[-1].iteration)
    end_node(outcomes[-1], evaluated, pools, of_execution)
    return outcomes


@workflow
def training(config: Configuration = {}, count: Count = Count(1)) -> IterationOutcome:  # type: ignore[assignment]  # noqa: B006, B008
    """Train a policy with GRPO for `count` more iterations, from where the run stands; returns the last one.

    Args:
        config: the run's configuration, a YAML or JSON file (see examples/), or a list of a file and fields to change
        count: how many iterations to add
    """
    outcome: IterationOutcome = iterations(config=config, count=count, code=code_digest())
    return outcome
