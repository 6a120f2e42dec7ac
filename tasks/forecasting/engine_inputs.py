"""The engines of a pool and of the trainer: measured, configured, or estimated from a data sheet."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from resources.accelerators import accelerator
from resources.pools import PoolConfig, pool_path
from resources.prices import UnknownMachine, machine_price
from tasks.crew_model.step_time import StepTime
from tasks.forecasting.engine_estimate import (
    MFU,
    Device,
    Points,
    bandwidth_reached,
    prefill_tokens_per_s,
    responses_that_fit,
    step_points,
)
from tasks.forecasting.known_facts import KnownFacts


@dataclass(frozen=True, kw_only=True)
class EngineFigures:
    """The figures of one engine.

    Attributes:
        step_s: (responses, seconds of a decode step).
        responses_max: most responses decoded together.
        prefill_tokens_per_s: rate of reading prompts and prefixes.
    """

    step_s: Points
    responses_max: int
    prefill_tokens_per_s: float


def device(name: str, pool: PoolConfig, gpus: int) -> Device | None:
    """The GPUs of an engine or of the trainer; None without GPUs.

    Raises LookupError for an accelerator without a data sheet.
    """
    if not gpus:
        return None
    found = pool.accelerator
    if found is None:
        with suppress(UnknownMachine):
            found = machine_price(pool.machine).accelerator
    try:
        known = accelerator(found or "")
    except LookupError as error:
        raise LookupError(f"{pool_path(name)}: {error}; for a forecast name the most similar of them") from None
    return Device(accelerator=known, gpus=gpus, bandwidth_efficiency=bandwidth_reached(known), mfu=MFU)


def engine_figures(
    facts: KnownFacts, name: str, pool: PoolConfig, configured: Mapping[str, float] | None
) -> EngineFigures:
    """The figures of one engine of a pool; configured: step times by batch in the configuration, None: none.

    Raises ValueError and LookupError with the pool's missing or unfit field.
    """
    limit = facts.config.rollout.max_responses_in_flight
    probed = None if facts.probe is None else facts.probe.pools.get(name)
    is_timed = configured is not None or (probed is not None and bool(probed.step_s))
    found = _engine_device(facts, name, pool, is_timed=is_timed)
    if found is not None and facts.size is not None:
        limit = min(limit, _fit(facts, name, found))
    if probed is not None and facts.probe is not None and probed.step_s:
        points, source = probed.step_s, facts.probe.source
    elif configured is not None:
        points = tuple(sorted((int(batch), step_s) for batch, step_s in configured.items()))
        source = "configured (step_s)"
    elif found is not None:
        points = step_points(facts.sized(), found, limit, facts.context)
        source = f"estimated: {found.gpus} x {found.accelerator.name} ({found.accelerator.source}), "
        source += f"{found.bandwidth_efficiency:.0%} of bandwidth, {found.mfu:.0%} of arithmetic, constants of a step"
    else:
        raise ValueError(
            f"{pool_path(name)}.gpus: value 0, and no step time is known; allowed: at least 1, forecast.step_s, or a "
            "run.url with a committed iteration"
        )
    curve = StepTime(points)
    words = f"{curve.tokens_per_s(limit):.0f} tokens/s with {limit} responses, {1 / curve.step_s(1):.0f} with one"
    facts.show(f"{name}: engine", words, source)
    prefill = curve.tokens_per_s(limit)
    if found is not None and facts.size is not None:
        prefill = prefill_tokens_per_s(facts.size, found)
    return EngineFigures(step_s=points, responses_max=limit, prefill_tokens_per_s=prefill)


def _engine_device(facts: KnownFacts, name: str, pool: PoolConfig, *, is_timed: bool) -> Device | None:
    """The engine's GPUs; None for unknown GPUs if step times are known (is_timed)."""
    try:
        return device(name, pool, facts.gpus_per_engine if pool.gpus else 0)
    except LookupError:
        if not is_timed:
            raise
        return None


def _fit(facts: KnownFacts, name: str, found: Device) -> int:
    vllm = facts.config.rollout.vllm
    try:
        return responses_that_fit(
            facts.sized(), found, facts.context, vllm.gpu_memory_utilization, vllm.kv_cache_memory_bytes
        )
    except ValueError as error:
        raise ValueError(f"{pool_path(name)}: {error}") from None
