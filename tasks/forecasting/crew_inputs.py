"""The pools of the crew, as configured, and trimmed to the GPUs that engines use."""

from dataclasses import dataclass, replace

from resources.pools import RolloutPoolConfig, pool_path
from resources.spot_trace import AWS_P3
from storage.records.forecast_records import Setting
from tasks.configuration.forecast import LINK_GBPS, VLLM_START_S
from tasks.forecasting.engine_inputs import engine_figures
from tasks.forecasting.known_facts import KnownFacts
from tasks.forecasting.probe import PoolProbe
from tasks.forecasting.scenario import AvailabilityScenario, PoolScenario

# Fewer losses say little about a rate.
LOSSES_MIN = 3


@dataclass(frozen=True, kw_only=True)
class CrewPool:
    """A pool of the crew.

    Attributes:
        path: path of the pool's section in the configuration.
        configured: the pool as configured.
        trimmed: the pool without unused GPUs, for the compared setups.
        trim: settings that change `configured` into `trimmed`, by path.
    """

    path: str
    configured: PoolScenario
    trimmed: PoolScenario
    trim: dict[str, Setting]


def crew_pools(facts: KnownFacts) -> tuple[CrewPool, ...]:
    """The pools in the configuration's order; raises as engine_figures."""
    return tuple(_crew_pool(facts, name, pool) for name, pool in facts.config.pools.rollout_pools.items())


def _crew_pool(facts: KnownFacts, name: str, pool: RolloutPoolConfig) -> CrewPool:
    path = pool_path(name)
    configured = _scenario(facts, name, pool)
    per_engine = facts.gpus_per_engine
    if pool.gpus <= per_engine:
        return CrewPool(path=path, configured=configured, trimmed=configured, trim={})
    unused = f"{pool.gpus - per_engine} of a slot's {pool.gpus} GPUs are paid for and unused"
    source = f"{path}.gpus {pool.gpus}, and a member is one engine, of {per_engine}"
    if pool.usd_per_hour is not None:
        facts.show(f"{name}: GPUs", unused, f"{source}; usd_per_hour is of the whole slot")
        return CrewPool(path=path, configured=configured, trimmed=configured, trim={})
    facts.show(f"{name}: GPUs", f"{unused}; other setups have {per_engine}", source)
    fewer = replace(pool, gpus=per_engine)
    trimmed = replace(configured, gpus=float(per_engine), usd_per_h=fewer.price_usd_per_h)
    return CrewPool(path=path, configured=configured, trimmed=trimmed, trim={f"{path}.gpus": per_engine})


def _scenario(facts: KnownFacts, name: str, pool: RolloutPoolConfig) -> PoolScenario:
    # Machines of a further pool may be of another kind.
    measured = facts.config.forecast.step_s if name == "rollout" else None
    figures = engine_figures(facts, name, pool, measured)
    probed = None if facts.probe is None else facts.probe.pools.get(name)
    price = "configured (usd_per_hour)" if pool.usd_per_hour is not None else f"price table, {pool.machine}"
    facts.show(f"{name}: price", f"{pool.price_usd_per_h:.2f} $/h of a slot", price)
    return PoolScenario(
        name=name,
        interruptible=pool.interruptible,
        count=pool.count,
        count_min=pool.count_min,
        usd_per_h=pool.price_usd_per_h,
        gpus=pool.gpus,
        responses_max=figures.responses_max,
        step_s=figures.step_s,
        prefill_tokens_per_s=figures.prefill_tokens_per_s,
        start_s=0.0 if facts.in_turn else facts.config.forecast.start_s,
        process_s=_process_s(facts, name, probed),
        link_gbps=LINK_GBPS,
        egress_usd_per_gb=pool.egress_usd_per_gb,
        availability=_availability(facts, name, pool, probed) if pool.interruptible else None,
    )


def _process_s(facts: KnownFacts, name: str, probed: PoolProbe | None) -> float:
    machine_s, link = facts.config.forecast.start_s, f"{LINK_GBPS:g} Gbit/s"
    if probed is None or probed.start_s is None or facts.probe is None:
        words = f"machine {machine_s:g} s, process {VLLM_START_S:g} s, weights meanwhile at {link}"
        facts.show(f"{name}: start", words, "configured (start_s); process and link assumed")
        return VLLM_START_S
    machine = "no machine" if facts.in_turn else f"machine {machine_s:g} s (configured)"
    words = f"{machine}, process until weights are in place {probed.start_s:.1f} s"
    facts.show(f"{name}: start", words, facts.probe.source)
    return probed.start_s


def _availability(
    facts: KnownFacts, name: str, pool: RolloutPoolConfig, probed: PoolProbe | None
) -> AvailabilityScenario:
    if pool.trace_path is not None:
        facts.show(f"{name}: losses", pool.trace_path, "configured (trace_path)")
        return AvailabilityScenario(path=pool.trace_path)
    process = AWS_P3
    if probed is not None and facts.probe is not None and probed.losses >= LOSSES_MIN:
        per_h = probed.losses / probed.machine_h
        words = f"{per_h:.2f} per machine hour ({probed.losses} in {probed.machine_h:.1f} h), as {process.name} loses"
        facts.show(f"{name}: losses", words, facts.probe.source)
        return AvailabilityScenario(process=process.name, rate_factor=per_h / process.losses_per_node_h)
    words = f"{process.losses_per_node_h:.2f} per machine hour, {process.name}"
    facts.show(f"{name}: losses", words, f"another kind of machine's: {process.source}")
    return AvailabilityScenario(process=process.name)
