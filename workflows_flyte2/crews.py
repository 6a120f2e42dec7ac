"""Crews on Flyte 2: groups of tasks of one run. Each task may fail alone, and nothing waits for a group."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import flyte

from resources.pools import PoolsConfig
from tasks.configuration.references import PlanReference
from tasks.configuration.run_config import RunConfig
from workflows.node_names import NodeNames
from workflows_flyte2.gleaner_tasks import rollout, rollout_ended, score, stand
from workflows_flyte2.pool_settings import settings_on

log = logging.getLogger(__name__)


async def group(
    task: Any, settings: dict[str, Any], slots: Sequence[int], width: int = 0, *, by: str = "slot", **bound: Any
) -> list[Any]:
    """Run a task for each slot, at most `width` at a time (0: all); returns what each returned, or its error.

    by: the task's input that is the slot.
    """
    of_slot, places = task.override(**settings), asyncio.Semaphore(width or max(1, len(slots)))

    async def one(slot: int) -> Any:
        async with places:
            return await of_slot(**{by: slot}, **bound)

    with flyte.group(settings["short_name"]):
        ended = await asyncio.gather(*map(one, slots), return_exceptions=True)
    for slot, outcome in zip(slots, ended, strict=True):
        if isinstance(outcome, BaseException):
            log.warning("%s, %s %d: %s", settings["short_name"], by, slot, outcome)
    return ended


async def crew_of_pool(
    reference: PlanReference, slots: list[int], pools: PoolsConfig, name: str, names: NodeNames, what: str
) -> None:
    """Run the members of a plan's crew that belong to the pool called `name`."""
    width = pools.rollout_pools[name].concurrency
    await group(rollout, settings_on(pools, name, names, what), slots, width, plan=reference)


def crews(
    reference: PlanReference, slots: list[list[int]], pools: PoolsConfig, names: NodeNames
) -> list[Coroutine[Any, Any, None]]:
    """The whole crew of a plan: for each pool its members, and behind the last of them the note of their end."""

    async def then_noted(name: str, of_pool: list[int]) -> None:
        what = "rollout" if name == "rollout" else f"rollout-{name}"
        await crew_of_pool(reference, of_pool, pools, name, names, what)
        await _note_end(reference, of_pool, pools, name, names, what)

    return [then_noted(name, of_pool) for name, of_pool in zip(pools.rollout_pools, slots, strict=True)]


def standing_crews(
    reference: PlanReference, pools: PoolsConfig, count: int, names: NodeNames
) -> list[Coroutine[Any, Any, None]]:
    """The same of a crew that stands for `count` iterations, of which `reference` is the first."""

    async def then_noted(name: str, slots: list[int]) -> None:
        what = "crew" if name == "rollout" else f"crew-{name}"
        settings, width = settings_on(pools, name, names, what), pools.rollout_pools[name].concurrency
        await group(stand, settings, slots, width, plan=reference, iterations=count)
        await _note_end(reference, slots, pools, name, names, what, count)

    return [then_noted(name, slots) for name, slots in pools.standing_slots.items()]


def scorers(reference: PlanReference, settings: RunConfig, names: NodeNames) -> list[Coroutine[Any, Any, list[Any]]]:
    """The scorers of a plan, if the teacher has a pool: they end when nothing is left to score."""
    if settings.teacher is None or settings.teacher.pool is None:
        return []
    name = settings.teacher.pool
    pool, of_pool = settings.pools.named(name), settings_on(settings.pools, name, names, "score")
    return [group(score, of_pool, range(pool.count), pool.concurrency, by="scorer", plan=reference)]


async def _note_end(
    reference: PlanReference,
    slots: list[int],
    pools: PoolsConfig,
    name: str,
    names: NodeNames,
    what: str,
    count: int = 1,
) -> None:
    """Note that no slot of the pool starts again; the trainer waits longer without the note, and so none is needed."""
    if slots:
        noted = rollout_ended.override(**settings_on(pools, "control", names, f"end-of-{what}"))
        await noted(plan=reference, pool=name, slots=slots, iterations=count)


class Beside:
    """Work that an execution starts beside its path, and awaits at the end alone."""

    def __init__(self) -> None:
        self._started: list[asyncio.Task[Any]] = []

    def start(self, *work: Coroutine[Any, Any, Any]) -> "list[asyncio.Task[Any]]":
        """Start each; its end may be awaited."""
        started = [asyncio.create_task(each) for each in work]
        self._started += started
        return started

    async def end(self, limit_s: float) -> None:
        """Wait so many seconds for the started work, then cancel the rest, for example members without a machine.

        Failures are logged, and fail no execution.
        """
        if self._started:
            _, late = await asyncio.wait(self._started, timeout=limit_s)
            for each in late:
                each.cancel()
            for outcome in await asyncio.gather(*self._started, return_exceptions=True):
                if isinstance(outcome, Exception):
                    log.warning("beside the run: %s", outcome)
