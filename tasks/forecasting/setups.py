"""The setups to compare: the trainer's machines alone, the crew alone, both, the user's own, and a chosen width.

A setup is a set of the configuration's fields, and the scenario that follows from them.
"""

from dataclasses import dataclass, replace

from storage.forecast_records import Setting
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.run_config import RunConfig
from tasks.forecasting.inputs import ForecastInputs
from tasks.forecasting.scenario import PoolScenario, Scenario

CONFIGURED = "as configured"
RESERVED = "reserved only"
CHOSEN = "width by cost"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """settings: the fields of the configuration that define the setup, by path."""

    name: str
    settings: dict[str, Setting]
    scenario: Scenario


def setups(config: RunConfig, inputs: ForecastInputs) -> tuple[Setup, ...]:
    """The user's own setup first; the others have the configuration's first pool only, and duplicates are left out.

    Raises ValueError if the configuration's own setup is impossible.
    """
    pool = inputs.pools[0]
    widths = config.forecast.widths or tuple(sorted({max(1, pool.count // 2), pool.count, 2 * pool.count}))
    can_seed = bool(inputs.trainer.engines)
    found = [_configured(config, inputs)]
    if can_seed:
        found.append(_setup(RESERVED, _reserved_settings(), inputs, ()))
    kind = "spot" if pool.interruptible else "crew"
    found += [_of_width(f"{kind} only, {width}", width, "off", inputs) for width in widths]
    if can_seed:
        found += [_of_width(f"reserved + {kind}, {width}", width, "auto", inputs) for width in widths]
    chosen: dict[str, Setting] = {
        "pools.rollout.count": max(widths),
        "pools.rollout.count_min": 0 if can_seed else 1,
        "planning.width": "cost",
        "planning.seeding": "auto" if can_seed else "off",
    }
    found.append(_setup(CHOSEN, chosen, inputs, (pool,)))
    unlike: list[Setup] = []
    for setup in found:
        alike = (replace(setup.scenario, name=other.scenario.name) for other in unlike)
        if not any(other.scenario == same for other, same in zip(unlike, alike, strict=True)):
            unlike.append(setup)
    return tuple(unlike)


def _configured(config: RunConfig, inputs: ForecastInputs) -> Setup:
    settings: dict[str, Setting] = {}
    for name, pool in config.pools.rollout_pools.items():
        path = f"pools.{name}" if name == "rollout" else f"pools.more_rollout.{name}"
        settings |= {f"{path}.count": pool.count, f"{path}.count_min": getattr(pool, "count_min", 0)}
    settings |= {"planning.width": config.planning.width, "planning.seeding": config.planning.seeding}
    return _setup(CONFIGURED, settings, inputs, inputs.pools)


def _reserved_settings() -> dict[str, Setting]:
    # A pool has at least one slot; the planner takes none if none is worth its price.
    return {
        "pools.rollout.count": 1,
        "pools.rollout.count_min": 0,
        "planning.width": "cost",
        "planning.seeding": "auto",
    }


def _of_width(name: str, width: int, seeding: str, inputs: ForecastInputs) -> Setup:
    settings: dict[str, Setting] = {
        "pools.rollout.count": width,
        "pools.rollout.count_min": min(inputs.pools[0].count_min, width),
        "planning.width": "fixed",
        "planning.seeding": seeding,
    }
    return _setup(name, settings, inputs, inputs.pools[:1])


def _setup(name: str, settings: dict[str, Setting], inputs: ForecastInputs, pools: tuple[PoolScenario, ...]) -> Setup:
    """The setup whose settings replace those of the first pool and of planning."""
    first = [
        replace(
            pool,
            count=int(settings["pools.rollout.count"] or 0),
            count_min=int(settings["pools.rollout.count_min"] or 0),
        )
        for pool in pools[:1]
    ]
    planning: PlanningConfig = replace(
        inputs.policy.planning,
        width=settings["planning.width"],  # type: ignore[arg-type]
        seeding=settings["planning.seeding"],  # type: ignore[arg-type]
    )
    scenario = Scenario(
        name=name,
        pools=(*first, *pools[1:]),
        trainer=inputs.trainer,
        work=inputs.work,
        policy=replace(inputs.policy, planning=planning),
    )
    return Setup(name=name, settings=settings, scenario=scenario)
