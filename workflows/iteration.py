"""One RL iteration: plan -> train -> conclude, and maps of the crew beside it, for which nothing waits.

Flyte's compiler walks every path of a workflow, so the nodes that carry a run on form one path: each node takes its
inputs from the node before. A rollout map and the node that notes its end are leaves. A configuration is annotated
`dict`, not `dict[str, Any]`, because Flyte carries the former as JSON and the latter as pickles.
"""

import functools
from typing import Any

from flytekit import workflow

from resources.package_code import code_digest
from resources.pools import PoolsConfig, overrides
from tasks.collect import collect
from tasks.conclude import conclude
from tasks.configuration.references import IterationOutcome
from tasks.configuration.run_config import RunConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.local_map import crew_map
from tasks.plan import plan
from tasks.rollout import IMPORTS, rollout
from tasks.rollout_ended import rollout_ended
from tasks.score import IMPORTS as SCORER_IMPORTS
from tasks.score import score
from tasks.stand import stand
from tasks.stand_trainer import stand_trainer
from tasks.train import train
from tasks.train_shared import train_shared
from workflows.config_input import Configuration
from workflows.leaves import leaf
from workflows.local_attempts import built_on
from workflows.node_names import NodeNames

# On one machine the last checkpoint may take longer to write than members take to leave.
TRAINER_END_LIMIT_S = 600.0


def settings_on(pools: PoolsConfig, pool: str, names: NodeNames, what: str) -> dict[str, Any]:
    """Arguments for `with_overrides` of the node called `what`, which runs on a pool of this name."""
    labels = {**names.labels(pool), **pools.labels}
    return {**overrides(pools.named(pool), labels), **names.of(what)}


def plan_node(
    config: dict[str, Any],
    pools: PoolsConfig,
    names: NodeNames,
    *,
    after: Any,
    ahead: int = 0,
    last: bool,
    code: str,
    evaluates: bool = False,
) -> Any:
    """Wire the plan; its outputs are those of tasks.plan."""
    task, crew = built_on(plan, pools, "control"), list(pools.rollout_pools)
    planned = task(config=config, after=after, ahead=ahead, pools=crew, last=last, evaluates=evaluates, code=code)
    return planned.with_overrides(**settings_on(pools, "control", names, "plan"))


def rollout_node(reference: Any, slots: Any, pools: PoolsConfig, name: str, names: NodeNames, what: str) -> Any:
    """Wire the members of a crew that belong to the pool called `name`."""
    pool, settings = pools.rollout_pools[name], settings_on(pools, name, names, what)
    crew = crew_map(
        functools.partial(rollout, plan=reference),
        concurrency=pool.concurrency,
        local_retries=pool.retries,
        imports=IMPORTS,
        title=settings["name"],
        pod_template=pool.pod_template,
    )
    return crew(slot=slots).with_overrides(**settings)


def rollout_nodes(reference: Any, slots: Any, pools: PoolsConfig, names: NodeNames) -> None:
    """Wire the whole crew of a plan: for each pool a map, and behind the map a node that notes its end."""
    for index, name in enumerate(pools.rollout_pools):
        what = "rollout" if name == "rollout" else f"rollout-{name}"
        crew = rollout_node(reference, slots[index], pools, name, names, what)
        crew >> ended_node(reference, slots[index], pools, name, names, what)


def scoring_nodes(reference: Any, config: RunConfig, names: NodeNames) -> None:
    """Wire the scorers of an iteration, if the teacher has a pool: a leaf that ends when nothing is left to score."""
    if config.teacher is None or config.teacher.pool is None:
        return
    pool, settings = (
        config.pools.named(config.teacher.pool),
        settings_on(config.pools, config.teacher.pool, names, "score"),
    )
    scorers = crew_map(
        functools.partial(score, plan=reference),
        concurrency=pool.concurrency,
        local_retries=pool.retries,
        imports=SCORER_IMPORTS,
        title=settings["name"],
        stands=True,
        pod_template=pool.pod_template,
    )
    scorers(scorer=list(range(pool.count))).with_overrides(**settings)


def ended_node(
    reference: Any, slots: Any, pools: PoolsConfig, name: str, names: NodeNames, what: str, count: int = 1
) -> Any:
    """Wire the leaf that notes the end of a pool's map, which Flyte alone knows: a member that is killed says nothing.

    Without the note the trainer waits longer before it generates. count: the iterations that the map is for.
    """
    settings = settings_on(pools, "control", names, f"end-of-{what}")
    bound = {"pool": name, "slots": slots, "iterations": int(count)}
    return leaf(rollout_ended, bound, pools, "control", settings)(plan=[reference]).with_overrides(**settings)


def standing_nodes(reference: Any, pools: PoolsConfig, count: int, names: NodeNames) -> None:
    """Wire a crew that stands for `count` iterations, of which `reference` is the first: a map for each pool."""
    for name, slots in pools.standing_slots.items():
        pool, what = pools.rollout_pools[name], "crew" if name == "rollout" else f"crew-{name}"
        settings = settings_on(pools, name, names, what)
        crew_of_pool = crew_map(
            functools.partial(stand, plan=reference, iterations=int(count)),
            concurrency=pool.concurrency,
            local_retries=pool.retries,
            imports=(*IMPORTS, "tasks.sampling.session.standing"),
            title=settings["name"],
            stands=True,
            pod_template=pool.pod_template,
        )
        crew = crew_of_pool(slot=slots).with_overrides(**settings)
        crew >> ended_node(reference, slots, pools, name, names, what, count)


def standing_trainer_node(
    reference: Any, pools: PoolsConfig, trainer: TrainerConfig, count: int, names: NodeNames
) -> None:
    """Wire the trainer that stands for `count` iterations from `reference` on, if the configuration asks for one.

    The trainer is a leaf: nothing waits for its pod, and without a pod each train node logs its wait for the trainer.
    """
    if trainer.placement != "standing":
        return
    settings = settings_on(pools, "train", names, "trainer")
    standing = crew_map(
        functools.partial(stand_trainer, iterations=int(count)),
        local_retries=pools.train.retries,
        imports=("tasks.sharing.standing_trainer",),
        title=settings["name"],
        stands=True,
        pod_template=pools.train.pod_template,
    )
    standing.end_limit_s = TRAINER_END_LIMIT_S
    standing(plan=[reference]).with_overrides(**settings)


def train_node(reference: Any, pools: PoolsConfig, trainer: TrainerConfig, names: NodeNames) -> Any:
    """Wire the trainer of a plan: a sibling of rollout, never downstream of it, because it follows the journal.

    With placement "pod" a collector on the control pool follows first, and the trainer is downstream of that. Where a
    host trains, that of `standing_trainer_node` or one of a fleet, or an external program, the train node itself is on
    the control pool.
    """
    if trainer.trained_by_host or trainer.is_external:
        waiting = built_on(train_shared, pools, "control")(plan=reference)
        return waiting.with_overrides(**settings_on(pools, "control", names, "train"))
    if trainer.placement == "pod":
        collecting = built_on(collect, pools, "control")(plan=reference)
        reference = collecting.with_overrides(**settings_on(pools, "control", names, "collect"))
    task = train
    if trainer.nnodes > 1:
        from tasks.train_elastic import elastic_trainer  # noqa: PLC0415 - where it is used

        task = elastic_trainer(trainer.nnodes, trainer.nproc_per_node)
    trained = built_on(task, pools, "train")(plan=reference)
    return trained.with_overrides(**settings_on(pools, "train", names, "train"))


def conclude_node(trained: Any, pools: PoolsConfig, names: NodeNames, *, last: bool, config: dict[str, Any]) -> Any:
    """Wire the conclusion of the trained iteration; its outputs are those of tasks.conclude.

    config: the run's, if it plans an evaluation; else empty.
    """
    concluded = built_on(conclude, pools, "control")(trained=trained, last=last, config=config)
    return concluded.with_overrides(**settings_on(pools, "control", names, "conclude"))


def iteration_nodes(
    config: dict[str, Any],
    after: Any,
    pools: PoolsConfig,
    trainer: TrainerConfig,
    names: NodeNames,
    *,
    last: bool,
    code: str,
) -> Any:
    """Wire one iteration's nodes; `after` is the iteration that must be concluded first (-1: none).

    train is called after rollout, because siblings run in the order of their calls on one machine.
    """
    reference, slots, *_ = plan_node(config, pools, names, after=after, last=last, code=code)
    rollout_nodes(reference, slots, pools, names)
    trained = train_node(reference, pools, trainer, names)
    outcome, *_ = conclude_node(trained, pools, names, last=last, config={})
    return outcome


@workflow
def iteration(config: Configuration, after: int = -1) -> IterationOutcome:
    """Advance a run by one iteration, on the default pools.

    Args:
        config: the run's configuration, a YAML or JSON file
        after: the iteration that must be concluded first; only orders
    """
    nodes = iteration_nodes(config, after, PoolsConfig(), TrainerConfig(), NodeNames(), last=True, code=code_digest())
    outcome: IterationOutcome = nodes
    return outcome
