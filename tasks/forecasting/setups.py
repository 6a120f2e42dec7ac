"""The setups to compare: the user's own, the trainer's machines alone, each pool alone, both, and a chosen width.

A pool alone is compared with either kind of crew. A setup is a set of the configuration's fields, and the scenario with
these settings.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from storage.records.forecast_records import Setting
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.run_config import RunConfig
from tasks.forecasting.crew_inputs import CrewPool
from tasks.forecasting.inputs import ForecastInputs
from tasks.forecasting.scenario import PoolScenario, Scenario

CONFIGURED = "as configured"
RESERVED = "reserved only"
CHOSEN = "width by cost"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A setup to compare.

    Attributes:
        name: name in the forecast's table.
        settings: the fields of the configuration that define the setup, by path.
        scenario: the scenario with the settings.
    """

    name: str
    settings: dict[str, Setting]
    scenario: Scenario


def setups(config: RunConfig, inputs: ForecastInputs) -> tuple[Setup, ...]:
    """The user's own setup first; duplicates are left out.

    Raises ValueError if the configuration's own setup is impossible.
    """
    found = [configured(config, inputs), *_alternatives(config, inputs)]
    unlike: list[Setup] = []
    for setup in found:
        alike = (replace(setup.scenario, name=other.scenario.name) for other in unlike)
        if not any(other.scenario == same for other, same in zip(unlike, alike, strict=True)):
            unlike.append(setup)
    return tuple(unlike)


def configured(config: RunConfig, inputs: ForecastInputs) -> Setup:
    """The user's own setup."""
    settings: dict[str, Setting] = {}
    for pool in inputs.pools:
        settings |= {f"{pool.path}.count": pool.configured.count, f"{pool.path}.count_min": pool.configured.count_min}
    settings |= {"planning.width": config.planning.width, "planning.seeding": config.planning.seeding}
    settings["rollout.crew"] = config.rollout.crew
    return _setup(CONFIGURED, settings, inputs, [pool.configured for pool in inputs.pools])


def _alternatives(config: RunConfig, inputs: ForecastInputs) -> Iterator[Setup]:
    can_seed = bool(inputs.trainer.engines)
    if can_seed:
        yield _of_counts(RESERVED, {}, "auto", inputs)
    widths = {pool.path: _widths(config, pool.configured) for pool in inputs.pools}
    for seeding, form in (("off", "{} only, {}"), ("auto", "reserved + {}, {}"))[: 1 + can_seed]:
        for pool in inputs.pools:
            for width in widths[pool.path]:
                yield _of_counts(form.format(_kind(pool, inputs), width), {pool.path: width}, seeding, inputs)
    for pool in inputs.pools if _may_stand(config.planning) else ():
        for width in widths[pool.path]:
            name = f"{_kind(pool, inputs)} standing, {width}"
            yield _of_counts(name, {pool.path: width}, "off", inputs, crew="standing")
    for factor, name in ((0.5, "half of every pool"), (2.0, "twice every pool"))[: 2 * (len(inputs.pools) > 1)]:
        counts = {pool.path: max(1, round(pool.configured.count * factor)) for pool in inputs.pools}
        yield _of_counts(name, counts, config.planning.seeding, inputs)
    yield _chosen({path: max(of_pool) for path, of_pool in widths.items()}, inputs, can_seed=can_seed)


def _may_stand(planning: PlanningConfig) -> bool:
    """True if the planning settings allow a standing crew: no setting saves money by releasing machines."""
    return planning.objective == "makespan" and planning.usd_per_iteration_max is None


def _widths(config: RunConfig, pool: PoolScenario) -> tuple[int, ...]:
    count = max(1, pool.count)
    return config.forecast.widths or tuple(sorted({max(1, count // 2), count, 2 * count}))


def _kind(pool: CrewPool, inputs: ForecastInputs) -> str:
    """The pool's word in the names of setups: its name among several pools, else "spot" or "crew"."""
    if len(inputs.pools) > 1:
        return pool.configured.name
    return "spot" if pool.configured.interruptible else "crew"


def _of_counts(
    name: str, counts: Mapping[str, int], seeding: str, inputs: ForecastInputs, crew: str = "iteration"
) -> Setup:
    """A setup with a fixed number of members of the pools in `counts`, by path, and no further members."""
    settings: dict[str, Setting] = {}
    pools = []
    for pool in inputs.pools:
        count = counts.get(pool.path, 0)
        least = min(pool.configured.count_min, count)
        settings |= {f"{pool.path}.count": count, f"{pool.path}.count_min": least}
        if count:
            settings |= pool.trim
            pools.append(replace(pool.trimmed, count=count, count_min=least))
    settings |= {"planning.width": "fixed", "planning.seeding": seeding, "rollout.crew": crew, **_no_cut(inputs)}
    return _setup(name, settings, inputs, pools)


def _chosen(most: Mapping[str, int], inputs: ForecastInputs, *, can_seed: bool) -> Setup:
    settings: dict[str, Setting] = {}
    pools = []
    for number, pool in enumerate(inputs.pools):
        least = 0 if can_seed or number else 1
        settings |= {f"{pool.path}.count": most[pool.path], f"{pool.path}.count_min": least} | pool.trim
        pools.append(replace(pool.trimmed, count=most[pool.path], count_min=least))
    seeding = "auto" if can_seed else "off"
    settings |= {"planning.width": "cost", "planning.seeding": seeding, "rollout.crew": "iteration", **_no_cut(inputs)}
    return _setup(CHOSEN, settings, inputs, pools)


def _no_cut(inputs: ForecastInputs) -> dict[str, Setting]:
    """Settings without a cut: in a forecast the machine of a member that leaves early stays paid for."""
    return {} if inputs.policy.planning.cut_share is None else {"planning.cut_share": None}


def _setup(name: str, settings: dict[str, Setting], inputs: ForecastInputs, pools: list[PoolScenario]) -> Setup:
    planning: PlanningConfig = replace(
        inputs.policy.planning,
        width=settings["planning.width"],  # type: ignore[arg-type]
        seeding=settings["planning.seeding"],  # type: ignore[arg-type]
        cut_share=settings.get("planning.cut_share", inputs.policy.planning.cut_share),  # type: ignore[arg-type]
    )
    policy = replace(inputs.policy, planning=planning, crew=settings["rollout.crew"])  # type: ignore[arg-type]
    scenario = Scenario(
        name=name,
        pools=tuple(pools),
        trainer=inputs.trainer,
        work=inputs.work,
        policy=policy,
        scorers=inputs.scorers,
    )
    return Setup(name=name, settings=settings, scenario=scenario)
