"""A member of the crew, on any machine: connects to the run's url, builds an engine and runs sessions."""

import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from resources.granted import check_granted
from resources.pools import pool_path
from resources.process import started_at_s
from resources.work_log import at_work
from storage.clock import Clock
from storage.records import layout, model_files, prompt_table
from storage.records.prompt_table import PromptRow
from storage.records.records import JOINED_POOL, TRAIN_POOL, PlanRecord
from storage.records.run import execution_of, exists, lease_holder, next_iteration, read_plan, read_run
from storage.stores.connect import connect
from storage.stores.metered import metered
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from storage.waiting import Wait
from storage.weights.adapters import loaded_bytes
from storage.weights.cache import open_cache
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.rollout import RolloutConfig
from tasks.configuration.run_config import RunConfig
from tasks.device.gpu_check import check_gpus
from tasks.sampling.engines.choose import build_engine, engine_settings
from tasks.sampling.engines.engine import Engine, EngineError
from tasks.sampling.session.draft_corpus import DraftCorpus
from tasks.sampling.session.draft_model import with_draft_model
from tasks.sampling.session.past_responses import opened_corpus
from tasks.sampling.session.pulled_model import WeightSource
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


@dataclass(frozen=True)
class PlannedIteration:
    """An iteration as a member works on it, read once.

    Attributes:
        store: the directory of the run or of the evaluation, with a count of requests.
        plan: the plan.
        config: the configuration in force.
    """

    store: ObjectStore
    plan: PlanRecord
    config: RunConfig

    @cached_property
    def weights(self) -> ObjectStore:
        """The directory of weights and model files: the run's, also for an evaluation.

        Raises ValueError when the plan is an evaluation's, but the url of `store` is not that of an evaluation.
        """
        return self.store if self.plan.weights_url is None else connect(layout.evaluated(self.store.url)[0])


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
    pool, first = plan.slots[slot].pool, PlannedIteration(store, plan, config_in_force(store, plan))
    planned = still_open(first, execution, notice, clock)
    if planned is None:
        return SessionOutcome.of_nothing()
    check_machine(f"slot {slot} of iteration {iteration} of {run_url}", planned, pool)
    with equipped(planned, build, clock, ahead=planned.plan.weight_version) as equipment:
        # The iteration may have been closed while the engine started.
        planned = still_open(planned, execution, notice, clock)
        if planned is None:
            return SessionOutcome.of_nothing()
        number = slot
        if planned.plan.iteration != iteration:
            # The slot's pool may be missing from the other iteration's configuration, and then has no price there.
            pools = planned.config.pools.rollout_pools
            number, pool = helping_slot(store, planned.plan), pool if pool in pools else next(iter(pools))
        settings = session_config(planned.config, slot=number, pool=pool)
        return run_session(planned, equipment, settings, notice, clock)


def check_machine(what: str, planned: PlannedIteration, pool: str) -> None:
    """Log what a pod was granted, and refuse a machine that is not as its pool of the crew says.

    Raises MachineTooSmall if a pod cannot hold the weights of the plan, and WrongGpus.
    """
    config, version = planned.config, planned.plan.weight_version
    machine = config.pools.rollout_pools.get(pool)
    if machine is None:
        return

    def weights_bytes() -> int:
        # A template's volume may hold weights that another process has fetched; they reach a GPU piece by piece.
        if machine.gpus and machine.pod_template:
            return 0
        try:
            return loaded_bytes(planned.weights, version)
        except ObjectMissing:  # retention may have deleted it: the iteration is over
            return 0

    check_granted(what, pool, machine, weights_bytes, "a weight version")
    if config.rollout.engine != "scripted":
        check_gpus(pool_path(pool), machine.gpus, config.rollout.device)


def still_open(
    planned: PlannedIteration, execution: str, notice: Callable[[], bool], clock: Clock
) -> PlannedIteration | None:
    """Return the iteration if it is open, else the first open iteration, or None if there is none.

    Between two iterations of the execution, waits up to rollout.idle_timeout_s for the next plan. Raises Preempted
    after a notice.
    """
    store, plan, patience_s = planned.store, planned.plan, planned.config.rollout.idle_timeout_s
    if not exists(store, layout.closed(plan.iteration)):
        return planned
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
                plan = read_plan(store, iteration)
                return PlannedIteration(store, plan, config_in_force(store, plan))
        if lease_holder(store) != execution or waiting.is_over:
            log.info("iteration %d is closed, and no other is open", plan.iteration)
            return None
        waiting.pause(POLL_INTERVAL_S)
    raise Preempted


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


@dataclass(frozen=True)
class Equipment:
    """What a process opens once and uses in all its sessions.

    Attributes:
        engine: the engine, which keeps its weights between sessions.
        weights: where the engine's weights come from.
        environments: the answers to the policy's turns; None in a run without turns.
        health: whether the engine has died.
    """

    engine: Engine
    weights: WeightSource
    environments: Environments | None
    health: EngineHealth = field(default_factory=EngineHealth)


@contextmanager
def equipped(planned: PlannedIteration, build: Build, clock: Clock, ahead: int | None = None) -> Iterator[Equipment]:
    """Build an engine for the run's model, without weights, and open weights and environments; close all at the end.

    ahead: a weight version that is pulled while the engine starts.
    """
    config, run = planned.config, planned.weights
    # The folder in which processes of this machine share weights. Its place is not the run's own setting: the run's
    # writers must not choose where this machine deletes files.
    cache = open_cache(None, config.rollout.weight_cache_bytes_max)
    with WeightSource(run, cache, clock, ahead) as weights:
        at_work("starting the engine")
        with model_files.downloaded(run) as folder, with_draft_model(run, engine_settings(config)) as settings:
            engine = build(settings, folder, read_run(run).vocab_size)
            try:
                with opened_environments(config.turns, planned.store, planned.plan, folder) as environments:
                    yield Equipment(engine, weights, environments)
            finally:
                engine.close()


def run_session(
    planned: PlannedIteration,
    equipment: Equipment,
    settings: SessionConfig,
    notice: Callable[[], bool],
    clock: Clock,
    enough: Callable[[], bool] | None = None,
) -> SessionOutcome:
    """Run one session of one iteration.

    Once the iteration is closed, missing or corrupt objects are no error, because retention may be deleting them.
    Raises Preempted after a notice, EngineDied, and EngineError when an evaluation's weight version is gone.
    """
    store, plan, prompts = planned.store, planned.plan, prompt_table.read_prompts(planned.store, planned.plan)
    engine, slot = equipment.engine, settings.slot
    with opened_corpus(store, plan, planned.config, slot=slot, prompts=prompts, engine=engine, clock=clock) as corpus:
        return _run_session(planned, equipment, settings, prompts, corpus, notice, clock, enough)


def _run_session(
    planned: PlannedIteration,
    equipment: Equipment,
    settings: SessionConfig,
    prompts: Sequence[PromptRow],
    corpus: DraftCorpus | None,
    notice: Callable[[], bool],
    clock: Clock,
    enough: Callable[[], bool] | None,
) -> SessionOutcome:
    store, plan = planned.store, planned.plan
    session = Session(
        store,
        plan,
        prompts=prompts,
        engine=equipment.engine,
        environments=equipment.environments,
        load=lambda engine, heed: equipment.weights.load(engine, plan.weight_version, heed),
        config=settings,
        clock=clock,
        notice=notice,
        health=equipment.health,
        enough=enough,
        corpus=corpus,
    )
    at_work(f"generating for iteration {plan.iteration} as {session.incarnation}", session.state.in_words)
    log.info("slot %d: iteration %d as %s", settings.slot, plan.iteration, session.incarnation)
    try:
        outcome = session.run()
    except (ObjectMissing, CorruptObject) as error:
        if not exists(store, layout.closed(plan.iteration)):
            version, run = plan.weight_version, planned.weights
            if plan.weights_url is not None and not exists(run, layout.manifest(layout.weights(version))):
                raise EngineError(
                    f"weight version {version} is not in {run.url} any more; allowed: to evaluate a version that the "
                    "run's section `retention` keeps"
                ) from error
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
