"""A member on the trainer's machine generates until other members can, hands its responses over and frees the device.

At the beginning of an iteration this is the seeding of RLBoost (arXiv 2510.19225, section 4.1), on slots of the plan.
In the middle of an iteration it keeps the run going when no other member lives, on slots beyond the plan. At the end of
the session unfinished responses are free for the crew. With planning.seeding "auto" it stays beyond its time limit
until another member lives or no response is left.
"""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from storage.clock import Clock
from storage.journal.assembly import unended_responses
from storage.records import layout
from storage.records.records import TRAIN_POOL, PlanRecord
from storage.records.run import exists
from storage.stores.metered import metered
from storage.stores.store import ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.sampling.engines.choose import build_engine
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.session.crew_watch import CrewWatch
from tasks.sampling.session.member import (
    Build,
    PlannedIteration,
    equipped,
    helping_slot,
    run_session,
    session_config,
)
from tasks.sampling.session.session_config import SessionConfig

log = logging.getLogger(__name__)
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Seeded:
    """The generation of a rank; the time and tokens of a failed session are not counted.

    Attributes:
        seconds: the time from the engine's start to its end.
        tokens: the number of tokens generated.
    """

    seconds: float = 0.0
    tokens: int = 0

    def __add__(self, other: "Seeded") -> "Seeded":
        return Seeded(self.seconds + other.seconds, self.tokens + other.tokens)


@dataclass(frozen=True, kw_only=True)
class TrainersMachine:
    """Where a rank of the trainer generates.

    Attributes:
        rank: the number of the rank.
        ranks: the number of all ranks, whose generation ends together.
        device: the index of the rank's GPU; None if the machine has only one GPU.
        execution: the Flyte execution that advances the run.
    """

    rank: int
    ranks: int
    device: int | None
    execution: str


def is_seeded(plan: PlanRecord) -> bool:
    """Whether the plan gives any response to the trainer's machines."""
    return bool(_places(plan)) and (plan.seeding is None or plan.seeding.seeding_s != 0)


def is_due(store: ObjectStore, plan: PlanRecord) -> bool:
    """Whether an attempt to train generates before it trains.

    With a crew, attempts generate until the first batch is recorded: from then on training is under way, and other
    members have taken over the rest. Without a crew, every attempt generates the responses that have not ended.
    """
    if not is_seeded(plan) or exists(store, layout.closed(plan.iteration)):
        return False
    if not _is_colocated(plan) and exists(store, layout.batch(plan.iteration, 0)):
        return False
    return bool(unended_responses(store, plan))


def seed(
    store: ObjectStore,
    plan: PlanRecord,
    config: RunConfig,
    machine: TrainersMachine,
    clock: Clock,
    build: Build = build_engine,
) -> Seeded:
    """Generate as one rank of the trainer, for as long as the plan says, and longer while no other member lives.

    At the end the engine is closed and the device is free. If the engine cannot be kept alive, the crew continues this
    rank's responses; raises EngineDied if the plan has no crew.
    """
    places = _places(plan)
    if machine.rank >= len(places):
        return Seeded()
    colocated = _is_colocated(plan)
    seeding_s = None if plan.seeding is None else plan.seeding.seeding_s
    settings = replace(
        session_config(config, slot=places[machine.rank], pool=TRAIN_POOL),
        # Several ranks begin training together, so a rank gains nothing by leaving before the others.
        idle_timeout_s=math.inf if colocated or machine.ranks > 1 else config.rollout.idle_timeout_s,
        time_limit_s=seeding_s,
    )
    try:
        return _generate(store, plan, config, machine, settings, clock, build)
    except EngineDied as error:
        if colocated:
            raise
        log.warning("slot %d: it generates no more; the crew continues: %s", settings.slot, error)
        return Seeded()


def seed_again(
    store: ObjectStore,
    plan: PlanRecord,
    config: RunConfig,
    machine: TrainersMachine,
    clock: Clock,
    build: Build = build_engine,
) -> Seeded:
    """Generate as one rank of the trainer because no other member lives, until one works or no response is left.

    Raises EngineDied when the engine cannot be kept alive.
    """
    settings = replace(
        session_config(config, slot=helping_slot(store, plan), pool=TRAIN_POOL),
        # The time before was spent on training, not on this member.
        started_at_s=clock.wall(),
        # Responses of dead members are free only after claim_ttl_s, and no other member would take them.
        idle_timeout_s=math.inf,
        time_limit_s=0.0,
    )
    return _generate(store, plan, config, machine, settings, clock, build, again=True)


def _generate(
    store: ObjectStore,
    plan: PlanRecord,
    config: RunConfig,
    machine: TrainersMachine,
    settings: SessionConfig,
    clock: Clock,
    build: Build,
    *,
    again: bool = False,
) -> Seeded:
    """Build an engine and run one session on the engine. The time limit includes the engine's start.

    again: the crew was lost, so the session goes on until another member has loaded the weights; else until one lives.
    """
    # In a process of its own, vLLM leaves nothing on the device and does not touch the ranks' process group.
    rollout = replace(config.rollout, vllm=replace(config.rollout.vllm, process="own"))
    began_s = clock.monotonic()
    watch = CrewWatch(store, plan, config.rollout, config.planning, clock, execution=machine.execution)
    planned = PlannedIteration(metered(store), plan, replace(config, rollout=rollout))
    with _one_device(machine.device), equipped(planned, build, clock) as equipment:
        if settings.time_limit_s is not None:
            left_s = max(0.0, settings.time_limit_s - (clock.monotonic() - began_s))
            settings = replace(settings, time_limit_s=left_s)
        enough = (watch.works if again else watch.lives) if config.planning.seeding == "auto" else None
        outcome = run_session(planned, equipment, settings, lambda: False, clock, enough)
    return Seeded(clock.monotonic() - began_s, outcome.tokens_generated)


def _places(plan: PlanRecord) -> list[int]:
    """The slots that the plan gives to the trainer's ranks, in the order of ranks."""
    return [place.slot for place in plan.slots if place.pool == TRAIN_POOL and place.groups]


def _is_colocated(plan: PlanRecord) -> bool:
    """Whether the plan has no crew, so that only the trainer's machines generate."""
    return not plan.crew_slots


@contextmanager
def _one_device(device: int | None) -> Iterator[None]:
    """Let processes started inside the block see only one GPU; the current process is not affected."""
    if device is None:
        yield
        return
    before = os.environ.get(VISIBLE_DEVICES)
    os.environ[VISIBLE_DEVICES] = before.split(",")[device] if before else str(device)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE_DEVICES]
        else:
            os.environ[VISIBLE_DEVICES] = before
