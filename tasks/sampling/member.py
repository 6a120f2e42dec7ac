"""A member of the crew on whatever machine it runs: builds the adapters from the run's url, and drives sessions."""

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from resources.process import started_at_s
from storage import layout, model_files, prompt_table
from storage.clock import Clock
from storage.connect import connect
from storage.metered import metered
from storage.records import JOINED_POOL, TRAIN_POOL, PlanRecord
from storage.run import exists, read_config, read_plan, read_run
from storage.store import CorruptObject, ObjectMissing, ObjectStore
from storage.weight_cache import WeightCache, open_cache
from storage.weight_versions import pull_version
from tasks.configuration.run_config import RunConfig, parse
from tasks.sampling.choose import build_engine
from tasks.sampling.config import RolloutConfig
from tasks.sampling.engine import Engine, EngineError
from tasks.sampling.session import Session, SessionOutcome
from tasks.sampling.session_config import SessionConfig

log = logging.getLogger(__name__)
Build = Callable[[RolloutConfig, Path, int], Engine]


def generate_slot(
    run_url: str,
    iteration: int,
    slot: int,
    notice: Callable[[], bool],
    clock: Clock,
    build: Build = build_engine,
) -> SessionOutcome:
    """Generate what the plan gives to a slot, from where the journal stands, and help others.

    Raises Preempted after a notice, EngineDied when the engine cannot be kept alive here.
    """
    store = metered(connect(run_url))
    try:
        plan = read_plan(store, iteration)
    except ObjectMissing as error:
        raise EngineError(f"this machine does not see iteration {iteration} of the run at {run_url}") from error
    config = config_in_force(store, plan)
    settings = session_config(config, slot=slot, pool=plan.slots[slot].pool)
    with built_engine(weights_store(store, plan), config.rollout, build) as engine:
        return run_session(store, plan, engine, weight_cache(config), settings, notice, clock)


def config_in_force(store: ObjectStore, plan: PlanRecord) -> RunConfig:
    """The configuration under which an iteration is worked on now."""
    return parse(read_config(store, plan), f"the configuration of iteration {plan.iteration}")


def weights_store(store: ObjectStore, plan: PlanRecord) -> ObjectStore:
    """Where the plan's weights and model files are: in the run itself, or in the run that an evaluation is part of.

    Raises ValueError when the plan says that it is an evaluation's, and `store` is not where one can be.
    """
    if plan.weights_url is None:
        return store
    run_url, _ = layout.evaluated(store.url)
    return connect(run_url)


def session_config(config: RunConfig, *, slot: int, pool: str) -> SessionConfig:
    """The intervals of a run's configuration and the names of this process.

    Only the crew leaves early for the sake of its machines' time: others cost as much whether they help or not.
    """
    in_crew = pool not in (JOINED_POOL, TRAIN_POOL)
    return SessionConfig(
        slot=slot,
        pool=pool,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at_s=started_at_s(),
        flush_interval_s=config.rollout.flush_interval_s,
        heartbeat_interval_s=config.rollout.heartbeat_interval_s,
        claim_ttl_s=config.rollout.claim_ttl_s,
        idle_timeout_s=config.rollout.idle_timeout_s,
        engine_restarts_max=config.rollout.engine_restarts_max,
        objective=config.planning.objective if in_crew else "makespan",
        cut_share=config.planning.cut_share if in_crew else None,
    )


def weight_cache(config: RunConfig) -> WeightCache | None:
    """Where the processes of this machine share what they pull; None when they do not."""
    return open_cache(config.rollout.weight_cache_dir, config.rollout.weight_cache_bytes_max)


@contextmanager
def built_engine(store: ObjectStore, rollout: RolloutConfig, build: Build) -> Iterator[Engine]:
    """An engine for the run's model, without weights; closed at the end."""
    with tempfile.TemporaryDirectory(prefix="gleaner-model-") as folder:
        model_files.download(store, Path(folder))
        engine = build(rollout, Path(folder), read_run(store).vocab_size)
        try:
            yield engine
        finally:
            engine.close()


def run_session(
    store: ObjectStore,
    plan: PlanRecord,
    engine: Engine,
    cache: WeightCache | None,
    settings: SessionConfig,
    notice: Callable[[], bool],
    clock: Clock,
    *,
    engine_died: bool = False,
) -> SessionOutcome:
    """One session of one iteration on an engine; raises Preempted after a notice, and EngineDied.

    What is missing or does not fit is no error once the iteration is closed: retention has begun to delete it. Raises
    EngineError when an evaluation's weight version is gone.
    """
    store = metered(store)
    weights = weights_store(store, plan)

    def load(into: Engine, heed: Callable[[], None]) -> None:
        _, tensors = pull_version(weights, plan.weight_version, cache, clock, check=heed)
        into.load_weights(plan.weight_version, tensors)

    session = Session(
        store,
        plan,
        prompts=prompt_table.decode_prompts(plan.prompts_key, store.get(plan.prompts_key)),
        engine=engine,
        load=load,
        config=settings,
        clock=clock,
        notice=notice,
        engine_died=engine_died,
    )
    log.info("slot %d: iteration %d as %s", settings.slot, plan.iteration, session.incarnation)
    try:
        outcome = session.run()
    except (ObjectMissing, CorruptObject) as error:
        if not exists(store, layout.closed(plan.iteration)):
            if plan.weights_url is not None:
                check_weights(weights, plan.weight_version)
            raise
        log.info("slot %d: iteration %d was closed meanwhile: %s", settings.slot, plan.iteration, error)
        return session.outcome()
    log.info(
        "slot %d: %d tokens, %d responses ended", settings.slot, outcome.tokens_generated, outcome.responses_finished
    )
    return outcome


def check_weights(run: ObjectStore, version: int) -> None:
    """Raise EngineError when a run does not hold the weight version that is to be evaluated any more."""
    if not exists(run, layout.manifest(layout.weights(version))):
        raise EngineError(
            f"weight version {version} is not in {run.url} any more; allowed: to evaluate a version that the run's "
            "section `retention` keeps"
        )
