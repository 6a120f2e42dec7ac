"""A member of the crew, on any machine: connects to the run's url, builds an engine and runs sessions."""

import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from resources.granted import check_granted
from resources.pools import pool_path
from resources.process import started_at_s
from resources.work_log import at_work
from storage.clock import Clock
from storage.records import layout, model_files, prompt_table
from storage.records.records import JOINED_POOL, TRAIN_POOL, PlanRecord
from storage.records.run import execution_of, exists, lease_holder, next_iteration, read_plan, read_run
from storage.stores.connect import connect
from storage.stores.metered import metered
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from storage.waiting import Wait
from storage.weights.adapters import loaded_bytes
from storage.weights.cache import WeightCache, open_cache
from tasks.configuration.engine_settings import engine_settings
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.rollout import RolloutConfig
from tasks.configuration.run_config import RunConfig
from tasks.device.gpu_check import check_gpus
from tasks.sampling.engines.choose import build_engine
from tasks.sampling.engines.engine import Engine, EngineError
from tasks.sampling.session.pull_ahead import PullAhead
from tasks.sampling.session.pulled_model import pull_model
from tasks.sampling.session.session import Session
from tasks.sampling.session.session_config import SessionConfig
from tasks.sampling.session.session_outcome import EngineHealth, Preempted, SessionOutcome
from tasks.turns.environments import Environments
from tasks.turns.opened_environments import opened_environments

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 1.0
# In one iteration: an engine that died three times there would die again, so the machine is at fault.
ENGINE_RESTARTS_MAX = 2
Build = Callable[[RolloutConfig, Path, int], Engine]


def generate_slot(
    run_url: str,
    iteration: int,
    slot: int,
    notice: Callable[[], bool],
    clock: Clock,
    build: Build = build_engine,
    execution: str = "",
) -> SessionOutcome:
    """Generate the responses that the plan gives to a slot, continuing from the journal, then help other slots.

    If the slot's iteration is already closed, the member helps with the open iteration, provided `execution` works on
    one. Raises Preempted after a notice, EngineDied when the engine cannot be kept alive on this machine, and WrongGpus
    when the machine's GPUs are not those of the slot's pool.
    """
    store = metered(connect(run_url))
    try:
        plan = read_plan(store, iteration)
    except ObjectMissing as error:
        raise EngineError(f"this machine does not see iteration {iteration} of the run at {run_url}") from error
    config, pool = config_in_force(store, plan), plan.slots[slot].pool
    check_machine(f"slot {slot} of iteration {iteration} of {run_url}", store, plan, config, pool)
    patience_s = config.rollout.idle_timeout_s
    current = still_open(store, plan, execution, patience_s, notice, clock)
    if current is None:
        return SessionOutcome.of_nothing()
    check_pool(config, pool)
    cache = weight_cache(config)
    with (
        PullAhead(weights_store(store, current), current.weight_version, cache, clock) as ahead,
        equipped(store, current, config, build) as equipment,
    ):
        # The iteration may have been closed while the engine started.
        current = still_open(store, current, execution, patience_s, notice, clock)
        if current is None:
            return SessionOutcome.of_nothing()
        config = config_in_force(store, current)
        number = slot
        if current.iteration != plan.iteration:
            # The slot's pool may be missing from the other iteration's configuration, and then has no price there.
            pools = config.pools.rollout_pools
            number, pool = helping_slot(store, current), pool if pool in pools else next(iter(pools))
        settings = session_config(config, slot=number, pool=pool)
        return run_session(store, current, equipment, cache, settings, notice, clock, ahead=ahead)


def check_machine(what: str, store: ObjectStore, plan: PlanRecord, config: RunConfig, pool: str) -> None:
    """In a pod, log what it was granted; raises MachineTooSmall if it cannot hold the weights of the plan."""
    settings = config.pools.rollout_pools.get(pool)
    if settings is None:
        return

    def weights_bytes() -> int:
        # A volume may hold weights that another process has fetched; they reach a GPU piece by piece.
        if settings.gpus and (settings.mounts or settings.pod_template):
            return 0
        try:
            return loaded_bytes(weights_store(store, plan), plan.weight_version)
        except ObjectMissing:  # retention may have deleted it: the iteration is over
            return 0

    check_granted(what, pool, settings, weights_bytes, "a weight version")


def still_open(
    store: ObjectStore, plan: PlanRecord, execution: str, patience_s: float, notice: Callable[[], bool], clock: Clock
) -> PlanRecord | None:
    """Return the plan if its iteration is open, else the first open iteration's plan, or None if there is none.

    Between two iterations of the execution, waits up to patience_s for the next plan. Raises Preempted after a notice.
    """
    if not exists(store, layout.closed(plan.iteration)):
        return plan
    if plan.weights_url is not None:
        return None  # An evaluation has one iteration only.
    what = f"the plan after iteration {plan.iteration}, which is closed"
    waiting = Wait(what, clock, patience_s, "then this member leaves (rollout.idle_timeout_s)")
    at_work("between two iterations", waiting.described)
    while not notice():
        iteration = next_iteration(store)
        while exists(store, layout.closed(iteration)):
            iteration += 1
        with suppress(ObjectMissing):
            if execution_of(store, iteration) == execution:
                log.info("iteration %d is closed; helping with iteration %d", plan.iteration, iteration)
                return read_plan(store, iteration)
        if lease_holder(store) != execution or waiting.is_over:
            log.info("iteration %d is closed, and no other is open", plan.iteration)
            return None
        waiting.pause(POLL_INTERVAL_S)
    raise Preempted


def weights_store(store: ObjectStore, plan: PlanRecord) -> ObjectStore:
    """The store of the plan's weights and model files: the run itself, or the run to which an evaluation belongs.

    Raises ValueError when the plan is an evaluation's, but the url of `store` is not that of an evaluation.
    """
    if plan.weights_url is None:
        return store
    run_url, _ = layout.evaluated(store.url)
    return connect(run_url)


def session_config(config: RunConfig, *, slot: int, pool: str) -> SessionConfig:
    """A session's settings: the intervals of the run's configuration, and the names of this process.

    Only slots of the crew leave early to save GPU time: a joined or a trainer's machine costs no less without a member.
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
        engine_restarts_max=ENGINE_RESTARTS_MAX,
        objective=config.planning.objective if in_crew else "makespan",
        cut_share=config.planning.cut_share if in_crew else None,
    )


def check_pool(config: RunConfig, pool: str) -> None:
    """Raise WrongGpus if the machine's GPUs are not the configured GPUs of its pool of the crew."""
    machine = config.pools.rollout_pools.get(pool)
    if machine is not None and config.rollout.engine != "scripted":
        check_gpus(pool_path(pool), machine.gpus, config.rollout.device)


def weight_cache(config: RunConfig) -> WeightCache | None:
    """The folder in which processes of this machine share pulled weights; None when the configuration turns it off."""
    return open_cache(None, config.rollout.weight_cache_bytes_max)


@dataclass(frozen=True)
class Equipment:
    """The engine and environments of a process, which outlive a session.

    Attributes:
        engine: the engine, which keeps its weights between sessions.
        environments: the answers to the policy's turns; None in a run without turns.
        health: whether the engine has died.
    """

    engine: Engine
    environments: Environments | None
    health: EngineHealth = field(default_factory=EngineHealth)


@contextmanager
def equipped(store: ObjectStore, plan: PlanRecord, config: RunConfig, build: Build) -> Iterator[Equipment]:
    """Build an engine for the run's model, without weights, and open environments; close both at the end."""
    run = weights_store(store, plan)
    at_work("starting the engine")
    with model_files.downloaded(run) as folder:
        engine = build(engine_settings(config), folder, read_run(run).vocab_size)
        try:
            with opened_environments(config.turns, store, plan, folder) as environments:
                yield Equipment(engine, environments)
        finally:
            engine.close()


def run_session(
    store: ObjectStore,
    plan: PlanRecord,
    equipment: Equipment,
    cache: WeightCache | None,
    settings: SessionConfig,
    notice: Callable[[], bool],
    clock: Clock,
    *,
    enough: Callable[[], bool] | None = None,
    ahead: PullAhead | None = None,
) -> SessionOutcome:
    """Run one session of one iteration. ahead: has pulled weights since before the engine was built.

    Once the iteration is closed, missing or corrupt objects are no error, because retention may be deleting them.
    Raises Preempted after a notice, EngineDied, and EngineError when an evaluation's weight version is gone.
    """
    store = metered(store)
    weights = weights_store(store, plan)

    def load(into: Engine, heed: Callable[[], None]) -> None:
        tensors = None if ahead is None else ahead.take(plan.weight_version, heed)
        if tensors is None:
            held = into.patch_base
            _, tensors = pull_model(weights, plan.weight_version, cache, clock, check=heed, held=held)
        into.load_weights(plan.weight_version, tensors)

    session = Session(
        store,
        plan,
        prompts=prompt_table.read_prompts(store, plan),
        engine=equipment.engine,
        environments=equipment.environments,
        load=load,
        config=settings,
        clock=clock,
        notice=notice,
        health=equipment.health,
        enough=enough,
    )
    at_work(f"generating for iteration {plan.iteration} as {session.incarnation}", session.state.in_words)
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


def helping_slot(store: ObjectStore, plan: PlanRecord) -> int:
    """A slot number above the plan's and those of earlier helpers; it only names the member and need not be unique.

    Keys that no member of this version writes are passed over.
    """
    names = [key.rsplit("/", 1)[1] for key in store.list(layout.alive_all(plan.iteration))]
    known = [int(found[1]) for name in names if (found := re.fullmatch(r"(\d{5,9})-[0-9A-Za-z]+\.json", name))]
    return max([len(plan.slots) - 1, *known]) + 1


def check_weights(run: ObjectStore, version: int) -> None:
    """Raise EngineError when the run no longer holds the weight version that is to be evaluated."""
    if not exists(run, layout.manifest(layout.weights(version))):
        raise EngineError(
            f"weight version {version} is not in {run.url} any more; allowed: to evaluate a version that the run's "
            "section `retention` keeps"
        )
