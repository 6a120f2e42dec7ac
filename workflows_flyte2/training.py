"""Training on Flyte 2: one task chains iterations, and continues a run from the last one.

    flyte run --local workflows_flyte2/training.py training --config my.yaml --count 2

The order is that of `workflows/training.py`. Flyte 1's nodes are calls here, so the task sees values.
"""

import asyncio
import functools
from typing import Any, cast

from resources.package_code import code_digest
from resources.pools import PoolsConfig
from tasks.configuration.references import IterationOutcome, PlanReference
from tasks.configuration.run_config import RunConfig, parse
from tasks.configuration.trainer import TrainerConfig
from workflows.evaluation import evaluates
from workflows.node_names import NodeNames
from workflows_flyte2.carried import is_local
from workflows_flyte2.crews import Beside, crews, scorers, standing_crews
from workflows_flyte2.evaluating import end_evaluations, evaluation_beside
from workflows_flyte2.gleaner_tasks import (
    ENVIRONMENT,
    STANDING_IMPORTS,
    collect,
    conclude,
    plan,
    stand_trainer,
    train,
    train_shared,
)
from workflows_flyte2.member_process import start_ahead
from workflows_flyte2.pool_settings import settings_on

# For members that leave once the last iteration is concluded.
LEAVING_LIMIT_S = 600.0


@ENVIRONMENT.task
async def training(config: dict, count: int = 1) -> IterationOutcome:  # type: ignore[type-arg]
    """Train a policy for `count` more iterations, from where the run stands; returns the last one.

    Args:
        config: the run's configuration, a YAML or JSON file (see examples/)
        count: how many iterations to add
    """
    if count < 1:
        raise ValueError(f"count: value {count}; allowed: 1 or more")
    settings = parse(config)
    if settings.trainer.nnodes > 1:
        raise ValueError(f"trainer.nnodes: value {settings.trainer.nnodes}; allowed on Flyte 2: 1")
    if is_local() and any(pool.count for pool in settings.pools.rollout_pools.values()):
        start_ahead(STANDING_IMPORTS)
    beside = Beside()
    try:
        return await _chained(config, settings, count, beside)
    except BaseException:
        await beside.end(0.0)
        raise


async def _chained(config: dict[str, Any], settings: RunConfig, count: int, beside: Beside) -> IterationOutcome:
    """Chain iterations; with max_staleness s, iteration n + s is planned when n - 1 is concluded."""
    pools, ahead = settings.pools, settings.algorithm.max_staleness
    stands = settings.rollout.crew == "standing"
    names = [NodeNames.of_iteration(number, count, settings.run.url) for number in range(count + 1)]
    of_execution = NodeNames.of_execution(count, settings.run.url)
    with_evaluations, code = evaluates(settings), code_digest()
    planned: list[PlanReference] = []
    evaluated: list[Any] = []
    outcomes: list[IterationOutcome] = []

    async def plan_next(after: int) -> PlanReference:
        """Plan, and start the crew; returns the reference of the iteration to train then."""
        number = len(planned) + 1
        call = plan.override(**settings_on(pools, "control", names[number], "plan"))
        reference, slots, to_train, *evaluation = await call(
            config=config,
            after=after,
            pools=list(pools.rollout_pools),
            ahead=min(number - 1, ahead),
            last=number == count,
            evaluates=with_evaluations and number == 1,
            code=code,
        )
        planned.append(reference)
        if number == 1:
            evaluated.extend(beside.start(*evaluation_beside(settings, evaluation, names[0])))
            if settings.trainer.placement == "standing":
                beside.start(_standing_trainer(reference, pools, count, of_execution))
            if stands:
                beside.start(*standing_crews(reference, pools, count, of_execution))
        if not stands:
            beside.start(*crews(reference, slots, pools, names[number]))
        return cast("PlanReference", to_train)

    to_train = await plan_next(-1)
    for index in range(count):
        while not outcomes and len(planned) < min(1 + ahead, count):
            to_train = await plan_next(planned[-1].iteration)
        beside.start(*scorers(planned[index], settings, names[index + 1]))
        follows_plan = index == 0 or index + ahead < count
        trained = await _trained(
            to_train if follows_plan else planned[index], pools, settings.trainer, names[index + 1]
        )
        call = conclude.override(**settings_on(pools, "control", names[index + 1], "conclude"))
        of_run = config if with_evaluations else {}
        outcome, *evaluation = await call(trained=trained, last=index == count - 1, config=of_run)
        outcomes.append(outcome)
        evaluated += beside.start(*evaluation_beside(settings, evaluation, names[index + 1]))
        if len(planned) < count:
            to_train = await plan_next(outcome.iteration)
    ended = await asyncio.gather(*evaluated, return_exceptions=True)
    await beside.end(LEAVING_LIMIT_S)
    await end_evaluations(outcomes[-1], ended, pools, of_execution)
    return outcomes[-1]


async def _trained(reference: PlanReference, pools: PoolsConfig, trainer: TrainerConfig, names: NodeNames) -> Any:
    """Train a plan beside its crew: here, behind a collector, or by what waits for a host or an external program."""
    on_control = functools.partial(settings_on, pools, "control", names)
    if trainer.trained_by_host or trainer.is_external:
        return await train_shared.override(**on_control("train"))(plan=reference)
    if trainer.placement == "pod":
        reference = await collect.override(**on_control("collect"))(plan=reference)
    return await train.override(**settings_on(pools, "train", names, "train"))(plan=reference)


async def _standing_trainer(reference: PlanReference, pools: PoolsConfig, count: int, names: NodeNames) -> None:
    """The trainer that stands for `count` iterations from `reference` on."""
    call = stand_trainer.override(**settings_on(pools, "train", names, "trainer"))
    await call(plan=reference, iterations=count)
