"""Evaluation of a weight version: a plan, then rollout -> evaluate; alone, or behind training's conclusions."""

from collections.abc import Sequence
from typing import Any

from flytekit import dynamic, workflow

from resources.package_code import code_digest
from resources.pools import ControlPoolConfig, PoolsConfig, task_settings
from tasks.configuration.references import EvaluationOutcome
from tasks.configuration.rewards import RewardConfig
from tasks.configuration.run_config import RunConfig, parse
from tasks.evaluate import evaluate, plan_evaluation
from tasks.evaluations_ended import evaluations_ended
from tasks.reporting.interruption import announced_interruption
from tasks.task_log import check_code, logged_wiring
from workflows.config_input import Configuration
from workflows.iteration import rollout_node, settings_on
from workflows.leaves import leaf
from workflows.local_attempts import built_on
from workflows.node_names import NodeNames


def evaluation_nodes(config: dict[str, Any], version: Any, pools: PoolsConfig, names: NodeNames, *, code: str) -> Any:
    """Wire one evaluation, alone: if it fails, so does the execution."""
    planned = built_on(plan_evaluation, pools, "control")(config=config, version=version, code=code)
    reference, slots = planned.with_overrides(**settings_on(pools, "control", names, "evaluation-plan"))
    crew = rollout_node(reference, slots, pools, "rollout", names, "evaluation-rollout")
    pool = grading_pool(evaluation_rewards(parse(config)))
    evaluated = built_on(evaluate, pools, pool)(plan=reference)
    evaluated = evaluated.with_overrides(**settings_on(pools, pool, names, "evaluation"))
    crew >> evaluated
    return evaluated


def evaluation_beside(settings: RunConfig, planned: Any, names: NodeNames) -> list[Any]:
    """Wire one evaluation beside training, if the configuration evaluates; returns its leaf, for `end_node`.

    planned: outputs of the plan or the conclusion about the evaluation. Whether the evaluation is due is known only at
    run time, and an evaluation that is not due has no pods. On one machine, where nodes run in the order of their
    calls, the evaluation comes before the next iteration, whose conclusion may delete older weights.
    """
    if not evaluates(settings):
        return []
    (reference, slots, due), pools, pool = planned, settings.pools, grading_pool(evaluation_rewards(settings))
    crew = rollout_node(reference, slots, pools, "rollout", names, "evaluation-rollout")
    of_node = settings_on(pools, pool, names, "evaluation")
    evaluated = leaf(evaluate, {}, pools, pool, of_node)(plan=due).with_overrides(**of_node)
    crew >> evaluated
    return [evaluated]


def end_node(concluded: Any, evaluated: list[Any], pools: PoolsConfig, names: NodeNames) -> None:
    """Wire the end of an execution that evaluates: it fails if an evaluation did, when all iterations are concluded."""
    if evaluated:
        ended = built_on(evaluations_ended, pools, "control")(concluded=concluded, evaluated=evaluated)
        ended.with_overrides(**settings_on(pools, "control", names, "evaluations"))


def evaluates(config: RunConfig) -> bool:
    """Whether training evaluates at all."""
    return config.evaluation is not None and config.evaluation.interval > 0


def grading_pool(rewards: Sequence[RewardConfig]) -> str:
    """The pool that grades: a reward model needs the kind of machine that grades in training."""
    return "train" if any(reward.model is not None for reward in rewards) else "control"


def evaluation_rewards(config: RunConfig) -> Sequence[RewardConfig]:
    """The rewards of the evaluation: its own, or those of training."""
    own = config.evaluation.rewards if config.evaluation is not None else None
    return own or config.rewards


@dynamic(**task_settings(ControlPoolConfig()))
def evaluate_version(config: dict, version: int, code: str = "") -> EvaluationOutcome:  # type: ignore[type-arg]
    """Evaluate once, on the pools that the configuration names. code: as of `iterations`."""
    check_code("evaluate_version", code)
    settings = parse(config)
    names = NodeNames(run=settings.run.url)
    wired = logged_wiring(f"run {settings.run.url}", f"the evaluation of version {version}")
    with wired, announced_interruption(settings.run.url):
        outcome: EvaluationOutcome = evaluation_nodes(config, version, settings.pools, names, code=code)
    return outcome


@workflow
def evaluation(config: Configuration = {}, version: int = -1) -> EvaluationOutcome:  # type: ignore[assignment]  # noqa: B006
    """Evaluate a run's weights as the section `evaluation` of its configuration says.

    Args:
        config: the run's configuration, a YAML or JSON file
        version: the weight version; -1: the newest
    """
    outcome: EvaluationOutcome = evaluate_version(config=config, version=version, code=code_digest())
    return outcome
