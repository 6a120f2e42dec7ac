"""The pools of the crew, as configured, and trimmed to the GPUs that engines use."""

from dataclasses import dataclass, replace

from resources.pools import RolloutPoolConfig, pool_path
from resources.spot_trace import AWS_P3
from storage.records.forecast_records import Setting
from tasks.configuration.forecast import VLLM_START_S, ForecastConfig
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


@dataclass(frozen=True, kw_only=True)
class _PoolSettings:
    """The settings of one pool in the section `forecast`; fields as in ForecastConfig."""

    step_s: dict[str, float] | None
    link_gbps: float
    trace_path: str | None
    loss_rate_factor: float
    start_s: float


def _pool_settings(forecast: ForecastConfig, name: str) -> _PoolSettings:
    """The settings of a pool: `rollout` has the section's own fields, further pools have entries in more_rollout.

    A pool of more_rollout takes missing fields from the section, but no step times, because its machines may be of a
    different kind.
    """
    fields = ("link_gbps", "trace_path", "loss_rate_factor", "start_s")
    settings = {field: getattr(forecast, field) for field in fields}
    if name == "rollout":
        return _PoolSettings(step_s=forecast.step_s, **settings)
    own = forecast.more_rollout.get(name)
    given = {} if own is None else {field: value for field, value in vars(own).items() if value is not None}
    return _PoolSettings(step_s=None, **{**settings, **given})


def _crew_pool(facts: KnownFacts, name: str, pool: RolloutPoolConfig) -> CrewPool:
    path = pool_path(name)
    settings = _pool_settings(facts.config.forecast, name)
    configured = _scenario(facts, name, pool, settings)
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


def _scenario(facts: KnownFacts, name: str, pool: RolloutPoolConfig, settings: _PoolSettings) -> PoolScenario:
    figures = engine_figures(facts, name, pool, settings.step_s)
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
        start_s=0.0 if facts.in_turn else settings.start_s,
        process_s=_process_s(facts, name, settings, probed),
        link_gbps=settings.link_gbps,
        egress_usd_per_gb=pool.egress_usd_per_gb,
        availability=_availability(facts, name, settings, probed) if pool.interruptible else None,
    )


def _process_s(facts: KnownFacts, name: str, settings: _PoolSettings, probed: PoolProbe | None) -> float:
    link = f"{settings.link_gbps:g} Gbit/s"
    if probed is None or probed.start_s is None or facts.probe is None:
        words = f"machine {settings.start_s:g} s, process {VLLM_START_S:g} s, weights meanwhile at {link}"
        facts.show(f"{name}: start", words, "configured (start_s, link_gbps); process assumed")
        return VLLM_START_S
    machine = "no machine" if facts.in_turn else f"machine {settings.start_s:g} s (configured)"
    words = f"{machine}, process until weights are in place {probed.start_s:.1f} s"
    facts.show(f"{name}: start", words, facts.probe.source)
    return probed.start_s


def _availability(
    facts: KnownFacts, name: str, settings: _PoolSettings, probed: PoolProbe | None
) -> AvailabilityScenario:
    factor = settings.loss_rate_factor
    if settings.trace_path is not None:
        words = f"{settings.trace_path}, {factor:g} times as fast"
        facts.show(f"{name}: losses", words, "configured (trace_path)")
        return AvailabilityScenario(path=settings.trace_path, rate_factor=factor)
    process = AWS_P3
    if probed is not None and facts.probe is not None and probed.losses >= LOSSES_MIN:
        per_h = probed.losses / probed.machine_h
        words = f"{per_h:.2f} per machine hour ({probed.losses} in {probed.machine_h:.1f} h), as {process.name} loses"
        facts.show(f"{name}: losses", words, facts.probe.source)
        return AvailabilityScenario(process=process.name, rate_factor=per_h / process.losses_per_node_h)
    words = f"{process.losses_per_node_h * factor:.2f} per machine hour, {process.name} x {factor:g}"
    facts.show(f"{name}: losses", words, f"another kind of machine's: {process.source}")
    return AvailabilityScenario(process=process.name, rate_factor=factor)
