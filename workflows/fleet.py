"""Hosts of a fleet as a map over reserved machines: one execution for some hours, after which the next may follow."""

import functools
from pathlib import Path

from flytekit import LaunchPlan, dynamic, workflow
from flytekit.exceptions.user import FlyteUserRuntimeException

from resources.labels import FLEET_LABEL, POOL_LABEL, url_label
from resources.pools import ControlPoolConfig, overrides, task_settings
from tasks.configuration.run_config import dump, load, parse
from tasks.fleet_host import fleet_host
from tasks.local_map import crew_map
from tasks.task_log import logged_wiring
from workflows.config_input import Configuration
from workflows.count import Count
from workflows.schedules import cron, one_at_a_time
from workflows.uploads import take_along


@dynamic(**task_settings(ControlPoolConfig()))
def hosts(
    config: dict,  # type: ignore[type-arg]
    count: Count = Count(1),  # noqa: B008 - a number
    hours: float = 8.0,
    memory_gib: float = 64.0,
    backfill_s: float = 0.0,
) -> list[str | None]:
    """Serve the fleet of a run's configuration with `count` hosts; each ends at the first phase boundary after `hours`.

    Args:
        config: the configuration of one of its runs, a YAML or JSON file; trainer.fleet,
            trainer.nproc_per_node and pools.train are used
        count: the number of hosts, each on a machine of its own
        hours: how long they serve
        memory_gib: each machine's host memory for the states of runs
        backfill_s: while no phase is expected for so many seconds, a host generates responses for a run; 0: never
    """
    settings = parse(config)
    if settings.trainer.fleet is None:
        raise FlyteUserRuntimeException(ValueError("trainer.fleet: value null; allowed here: the url of a fleet"))
    pool = settings.pools.train
    serving = functools.partial(
        fleet_host,
        fleet=settings.trainer.fleet,
        hours=hours,
        memory_gib=memory_gib,
        devices=settings.trainer.nproc_per_node,
        backfill_s=backfill_s,
        usd_per_hour=pool.price_usd_per_h,
    )
    serving_all = crew_map(serving, title="hosts", pod_template=pool.pod_template)
    labels = {FLEET_LABEL: url_label(settings.trainer.fleet), POOL_LABEL: "train", **settings.pools.labels}
    with logged_wiring(f"fleet {settings.trainer.fleet}", f"{count} hosts"):
        served: list[str | None] = serving_all(slot=list(range(count))).with_overrides(**overrides(pool, labels))
    return served


@workflow
def serving(config: Configuration, count: Count, hours: float, memory_gib: float) -> list[str | None]:
    """The hosts as a workflow, which a launch plan needs; inputs as of `hosts`."""
    served: list[str | None] = hosts(config=config, count=count, hours=hours, memory_gib=memory_gib)
    return served


def scheduled_hosts(
    config: Path, schedule: str, *, count: int, hours: float, memory_gib: float, name: str = "fleet_hosts"
) -> LaunchPlan:
    """A launch plan that keeps hosts on reserved machines: at each tick, unless its last execution still runs.

    Hosts end at the first phase boundary after `hours`, so ticks that come more often than that leave no gap but the
    time to the next one. Raises ConfigError and ValueError for what cannot be.

    Args:
        config: the configuration of one of the fleet's runs; its content is fixed in the plan
        schedule: a cron expression of five fields, or @hourly and the like
        count: the number of hosts, each on a machine of its own
        hours: how long they serve
        memory_gib: each machine's host memory for the states of runs
        name: of the plan; each fleet of a project needs a name of its own
    """
    settings = load(config)
    take_along(settings)
    if settings.trainer.fleet is None:
        raise ValueError(f"{config}: trainer.fleet: value null; allowed here: the url of a fleet")
    for what, value in (("count", count), ("hours", hours), ("memory_gib", memory_gib)):
        if not value > 0:
            raise ValueError(f"{what}: value {value}; allowed: above 0")
    return LaunchPlan.get_or_create(
        serving,
        name=name,
        schedule=cron("schedule", schedule),
        fixed_inputs={"config": dump(settings), "count": count, "hours": float(hours), "memory_gib": float(memory_gib)},
        concurrency=one_at_a_time(),
    )
