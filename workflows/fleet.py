"""Hosts of a fleet as a map over reserved machines: one execution for some hours, after which the next may follow."""

import functools

from flytekit import dynamic
from flytekit.exceptions.user import FlyteUserRuntimeException

from resources.pools import ControlPoolConfig, overrides, task_settings
from tasks.configuration.run_config import parse
from tasks.fleet_host import fleet_host
from tasks.local_map import crew_map


@dynamic(**task_settings(ControlPoolConfig()))
def hosts(
    config: dict,  # type: ignore[type-arg]
    count: int = 1,
    hours: float = 8.0,
    memory_gib: float = 64.0,
    disk_gib: float = 0.0,
    backfill_s: float = 0.0,
) -> list[str | None]:
    """Serve the fleet of a run's configuration with `count` hosts; each ends at the first phase boundary after `hours`.

    Args:
        config: the configuration of one of its runs, a YAML or JSON file; trainer.fleet and pools.train are used
        count: the number of hosts, each on a machine of its own
        hours: how long they serve
        memory_gib: each machine's host memory for the states of runs
        disk_gib: each machine's local disk for copies of states that do not fit in host memory; 0: none
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
        disk_gib=disk_gib,
        backfill_s=backfill_s,
        usd_per_hour=pool.price_usd_per_h,
    )
    serving_all = crew_map(serving, title="hosts")
    served: list[str | None] = serving_all(slot=list(range(count))).with_overrides(**overrides(pool))
    return served
