"""The host task: trains the phases of several runs in turns, on one reserved machine."""

from flytekit import task

from resources.pools import PoolConfig, pod_template
from tasks.task_log import logged_task

DEFAULT_POOL = PoolConfig()


@task(interruptible=False, retries=DEFAULT_POOL.retries, pod_template=pod_template(DEFAULT_POOL))
def fleet_host(
    fleet: str,
    slot: int,
    hours: float,
    memory_gib: float,
    devices: int,
    backfill_s: float,
    usd_per_hour: float,
) -> str:
    """Serve a fleet for so many hours, then end at a phase boundary; returns the incarnation of the host.

    slot: only tells apart the elements of a map. backfill_s: see `HostSettings`; 0: no member generates.
    """
    from tasks.sharing.host_settings import HostSettings  # noqa: PLC0415 - when the task runs
    from tasks.sharing.serving import serve  # noqa: PLC0415 - when the task runs

    settings = HostSettings(hours=hours, backfill_s=backfill_s or None)
    with logged_task(f"fleet {fleet}, host {slot}", None, f"serve for {hours:g} h"):
        return serve(
            fleet,
            memory_gib=memory_gib,
            devices=devices,
            usd_per_hour=usd_per_hour,
            settings=settings,
        )
