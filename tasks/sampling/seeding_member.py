"""A member on the trainer's machine: it generates until training is to begin, hands over, and frees the device.

The seeding of RLBoost (arXiv 2510.19225, section 4.1). Its slots are units of the plan like others, so what it does
not finish is anybody's the moment it leaves. Where the plan has no other member, it generates everything.
"""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from storage import layout
from storage.assembly import JournalReader
from storage.clock import Clock
from storage.records import TRAIN_POOL, PlanRecord
from storage.run import exists
from storage.store import ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.sampling.choose import build_engine
from tasks.sampling.engine import EngineDied
from tasks.sampling.member import Build, built_engine, run_session, session_config, weight_cache, weights_store

log = logging.getLogger(__name__)
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Seeded:
    """How long a rank was at it, and the tokens it generated; those of an engine that died are not counted."""

    seconds: float = 0.0
    tokens: int = 0


def is_seeded(plan: PlanRecord) -> bool:
    """Whether the plan has work for the trainer's machines at all."""
    return bool(_places(plan)) and (plan.seeding is None or plan.seeding.seeding_s != 0)


def is_due(store: ObjectStore, plan: PlanRecord) -> bool:
    """Whether an attempt to train must, or may, generate first.

    With a crew only the first attempts do: once a batch is recorded, training has begun, and others have taken over
    what was left. Without one, every attempt generates whatever has not ended.
    """
    if not is_seeded(plan) or exists(store, layout.closed(plan.iteration)):
        return False
    if not _is_colocated(plan) and exists(store, layout.batch(plan.iteration, 0)):
        return False
    reader = JournalReader(store, plan)
    reader.refresh()
    ended = (response in reader.shards.ended for response in range(plan.num_responses))
    return not all(ended) or not all(reader.assemble(r).finish.ends_response for r in range(plan.num_responses))


def seed(
    store: ObjectStore,
    plan: PlanRecord,
    config: RunConfig,
    rank: int,
    device: int | None,
    clock: Clock,
    build: Build = build_engine,
) -> Seeded:
    """Generate as one rank of the trainer, for as long as the plan says; then nothing of it is left on the device.

    device: the number of this rank's GPU; None where there is but one. Raises EngineDied when the engine cannot be kept
    alive and nobody else would generate; otherwise others go on with what it had.
    """
    places = _places(plan)
    if rank >= len(places):
        return Seeded()
    colocated = _is_colocated(plan)
    settings = replace(
        session_config(config, slot=places[rank], pool=TRAIN_POOL),
        # Several ranks go on together, so there is nothing that one of them would wait for less.
        idle_timeout_s=math.inf if colocated or len(places) > 1 else config.rollout.idle_timeout_s,
    )
    # In a process of its own vLLM leaves nothing behind, and does not meet the process group of the trainer's ranks.
    rollout = replace(config.rollout, vllm=replace(config.rollout.vllm, process="own"))
    began_s = clock.monotonic()
    try:
        with _one_device(device), built_engine(weights_store(store, plan), rollout, build) as engine:
            if plan.seeding is not None and plan.seeding.seeding_s is not None:
                # The engine's start is a part of it: training is to begin when the plan says.
                left_s = plan.seeding.seeding_s - (clock.monotonic() - began_s)
                settings = replace(settings, time_limit_s=max(0.0, left_s))
            outcome = run_session(store, plan, engine, weight_cache(config), settings, lambda: False, clock)
        tokens = outcome.tokens_generated
    except EngineDied as error:
        if colocated:
            raise
        log.warning("slot %d: it generates no more, the crew goes on: %s", settings.slot, error)
        tokens = 0
    return Seeded(clock.monotonic() - began_s, tokens)


def _places(plan: PlanRecord) -> list[int]:
    """The slots of the trainer's ranks, in the order of ranks."""
    return [place.slot for place in plan.slots if place.pool == TRAIN_POOL and place.groups]


def _is_colocated(plan: PlanRecord) -> bool:
    """Whether nobody else generates."""
    return not any(place.groups for place in plan.slots if place.pool != TRAIN_POOL)


@contextmanager
def _one_device(device: int | None) -> Iterator[None]:
    """Have processes that are started within see only this GPU; ours goes on as it is."""
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
