"""Evaluation of a weight version: plan_evaluation -> rollout -> evaluate, alone or behind training's conclusions."""

from typing import Any

from flytekit import dynamic, workflow

from resources.pools import ControlPoolConfig, PoolsConfig, task_settings
from tasks.configuration.references import EvaluationOutcome
from tasks.configuration.run_config import RunConfig, parse
from tasks.evaluate import evaluate, plan_evaluation
from tasks.reporting.interruption import told_interruption
from workflows.iteration import rollout_node, settings_on
from workflows.local_attempts import built_on
from workflows.node_names import NodeNames


def evaluation_nodes(
    config: dict[str, Any],
    version: Any,
    pools: PoolsConfig,
    names: NodeNames,
    *,
    only_if_due: bool,
    resume: bool = False,
) -> Any:
    """Wire one evaluation. Whether it is due is known only when it runs; one that is not due has an empty crew."""
    planning = built_on(plan_evaluation, pools, "control")
    planned = planning(config=config, version=version, only_if_due=only_if_due, resume=resume)
    reference, slots, due = planned.with_overrides(**settings_on(pools, "control", names, "evaluation-plan"))
    crew = rollout_node(reference, slots, pools, "rollout", names, "evaluation-rollout")
    # A reward model needs a machine like the one that it has in training.
    pool = "train" if grades_with_a_model(parse(config)) else "control"
    evaluated = built_on(evaluate, pools, pool)(plan=reference, due=due, beside_training=only_if_due)
    evaluated = evaluated.with_overrides(**settings_on(pools, pool, names, "evaluation"))
    crew >> evaluated
    return evaluated


def evaluation_behind(config: dict[str, Any], concluded: Any, pools: PoolsConfig, names: NodeNames) -> None:
    """Wire the evaluation of what an iteration published, if training evaluates at all.

    Nothing waits for it, neither does the next iteration. On one machine, where nodes run in the order of their calls,
    it comes before the next iteration, whose conclusion may delete older weights.
    """
    if _evaluates(config):
        evaluation_nodes(config, concluded.weight_version, pools, names, only_if_due=True)


def evaluation_ahead(config: dict[str, Any], reference: Any, pools: PoolsConfig, count: int) -> None:
    """Wire the evaluation behind an execution's first plan, of the weights with which the run begins or continues.

    They are version 0, or a version that the previous execution did not get to. If they are already evaluated, it takes
    an interrupted evaluation instead. Nothing waits for it, as in `evaluation_behind`.
    """
    if _evaluates(config):
        names = NodeNames.of_iteration(0, count, parse(config).run.url)
        evaluation_nodes(config, reference.iteration, pools, names, only_if_due=True, resume=True)


def _evaluates(config: dict[str, Any]) -> bool:
    """Whether training evaluates at all."""
    evaluation = parse(config).evaluation
    return evaluation is not None and evaluation.interval > 0


def grades_with_a_model(config: RunConfig) -> bool:
    """Whether a reward model is among the rewards of the evaluation."""
    own = config.evaluation.rewards if config.evaluation is not None else None
    return any(reward.model is not None for reward in own or config.rewards)


@dynamic(**task_settings(ControlPoolConfig()))
def evaluate_version(config: dict, version: int) -> EvaluationOutcome:  # type: ignore[type-arg]
    """Evaluate once, on the pools that the configuration names."""
    settings = parse(config)
    names = NodeNames(run=settings.run.url)
    with told_interruption(settings.run.url):
        outcome: EvaluationOutcome = evaluation_nodes(config, version, settings.pools, names, only_if_due=False)
    return outcome


@workflow
def evaluation(config: dict = {}, version: int = -1) -> EvaluationOutcome:  # type: ignore[type-arg]  # noqa: B006
    """Evaluate a run's weights as the section `evaluation` of its configuration says.

    Args:
        config: the run's configuration, a YAML or JSON file
        version: the weight version; -1: the newest
    """
    outcome: EvaluationOutcome = evaluate_version(config=config, version=version)
    return outcome
