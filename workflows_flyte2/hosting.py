"""Hosts of a fleet on Flyte 2: one execution for some hours, after which the next may follow."""

from resources.labels import FLEET_LABEL, POOL_LABEL, url_label
from tasks.configuration.run_config import RunConfig, parse
from workflows_flyte2.crews import group
from workflows_flyte2.gleaner_tasks import ENVIRONMENT, fleet_host
from workflows_flyte2.pool_settings import overrides


@ENVIRONMENT.task
async def hosts(
    config: dict,  # type: ignore[type-arg]
    count: int = 1,
    hours: float = 8.0,
    memory_gib: float = 64.0,
    backfill_s: float = 0.0,
) -> list[str | None]:
    """Serve the fleet of a run's configuration with `count` hosts; returns their incarnations, None for a failure.

    Args:
        config: the configuration of one of its runs, a YAML or JSON file; trainer.fleet,
            trainer.nproc_per_node and pools.train are used
        count: the number of hosts, each on a machine of its own
        hours: how long they serve; each ends at the first phase boundary after that
        memory_gib: each machine's host memory for the states of runs
        backfill_s: while no phase is expected for so many seconds, a host generates responses for a run; 0: never
    """
    settings = parse(config)
    fleet, pool = fleet_of(settings), settings.pools.train
    labels = {FLEET_LABEL: url_label(fleet), POOL_LABEL: "train", **settings.pools.labels}
    served = await group(
        fleet_host,
        {"short_name": "hosts", **overrides("train", pool, labels)},
        range(count),
        fleet=fleet,
        hours=hours,
        memory_gib=memory_gib,
        devices=settings.trainer.nproc_per_node,
        backfill_s=backfill_s,
        usd_per_hour=pool.price_usd_per_h,
    )
    return [each if isinstance(each, str) else None for each in served]


def fleet_of(settings: RunConfig) -> str:
    """The url of the fleet; raises ValueError if the configuration names none."""
    if settings.trainer.fleet is None:
        raise ValueError("trainer.fleet: value null; allowed here: the url of a fleet")
    return settings.trainer.fleet
