"""The host task: trains the phases of several runs in turns, on one reserved machine."""

from flytekit import task

from resources.pools import PoolConfig, pod_template

DEFAULT_POOL = PoolConfig()


@task(interruptible=False, retries=DEFAULT_POOL.retries, pod_template=pod_template(DEFAULT_POOL))
def fleet_host(fleet: str, slot: int, hours: float, memory_gib: float, usd_per_hour: float) -> str:  # noqa: ARG001 - the map needs an input that differs
    """Serve a fleet for so many hours, then end at a phase boundary; returns the incarnation of the host.

    slot: only tells apart the elements of a map.
    """
    from tasks.sharing.host import HostSettings  # noqa: PLC0415 - when the task runs
    from tasks.sharing.serving import serve  # noqa: PLC0415

    return serve(fleet, memory_gib=memory_gib, usd_per_hour=usd_per_hour, settings=HostSettings(hours=hours))
