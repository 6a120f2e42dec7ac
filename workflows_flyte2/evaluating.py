"""Evaluations on Flyte 2: alone, by the task `evaluation`, and beside training, where a failure fails no iteration."""

from collections.abc import Coroutine, Sequence
from typing import Any

from resources.package_code import code_digest
from resources.pools import PoolsConfig
from tasks.configuration.references import EvaluationOutcome, IterationOutcome, PlanReference
from tasks.configuration.run_config import RunConfig, parse
from workflows.evaluation import evaluation_rewards, grading_pool
from workflows.node_names import NodeNames
from workflows_flyte2.crews import crew_of_pool
from workflows_flyte2.gleaner_tasks import ENVIRONMENT, evaluate, evaluations_ended, plan_evaluation
from workflows_flyte2.pool_settings import settings_on


@ENVIRONMENT.task
async def evaluation(config: dict, version: int = -1) -> EvaluationOutcome:  # type: ignore[type-arg]
    """Evaluate a run's weights as the section `evaluation` of its configuration says.

    Args:
        config: the run's configuration, a YAML or JSON file
        version: the weight version; -1: the newest
    """
    settings = parse(config)
    names = NodeNames(run=settings.run.url)
    call = plan_evaluation.override(**settings_on(settings.pools, "control", names, "evaluation-plan"))
    reference, slots = await call(config=config, version=version, code=code_digest())
    return await _evaluated(settings, reference, slots, reference, names)


def evaluation_beside(
    settings: RunConfig, planned: list[Any], names: NodeNames
) -> list[Coroutine[Any, Any, EvaluationOutcome]]:
    """The evaluation that a plan or a conclusion asks for, if any; planned: what it returned about it."""
    reference, slots, due = planned
    return [_evaluated(settings, reference, slots, each, names) for each in due]


async def _evaluated(
    settings: RunConfig, reference: PlanReference, slots: list[int], due: PlanReference, names: NodeNames
) -> EvaluationOutcome:
    await crew_of_pool(reference, slots, settings.pools, "rollout", names, "evaluation-rollout")
    pool = grading_pool(evaluation_rewards(settings))
    outcome: EvaluationOutcome = await evaluate.override(**settings_on(settings.pools, pool, names, "evaluation"))(
        plan=due
    )
    return outcome


async def end_evaluations(
    concluded: IterationOutcome, ended: Sequence[Any], pools: PoolsConfig, names: NodeNames
) -> None:
    """Fail the execution if an evaluation failed. ended: what each returned, or its error."""
    if ended:
        outcomes = [[None if isinstance(each, BaseException) else each] for each in ended]
        call = evaluations_ended.override(**settings_on(pools, "control", names, "evaluations"))
        await call(concluded=concluded, evaluated=outcomes)
