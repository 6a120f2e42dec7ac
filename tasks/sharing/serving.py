"""Serving a fleet: a host with worker processes of this machine, from its beginning to its end."""

import socket

from resources.notice import PreemptionNotice
from storage.clock import SystemClock
from storage.fleet_records import GIB, HostRecord
from storage.records import nonce
from tasks.sharing.host import Host, HostSettings
from tasks.sharing.membership import open_fleet
from tasks.sharing.process_workers import ProcessWorkers


def serve(
    fleet: str,
    *,
    memory_gib: float,
    usd_per_hour: float | None,
    settings: HostSettings,
) -> str:
    """Serve a fleet until SIGTERM comes or the hours of the settings are over; ends at a phase boundary.

    memory_gib: room for resident states in host memory. Raises LookupError if there is no fleet.
    """
    clock = SystemClock()
    store, rules = open_fleet(fleet)
    me = HostRecord(
        incarnation=nonce(),
        machine=socket.gethostname(),
        memory_bytes=round(memory_gib * GIB),
        usd_per_hour=usd_per_hour,
        began_at_s=clock.wall(),
    )
    with PreemptionNotice() as notice, ProcessWorkers() as workers:
        Host(store, rules, me, settings, workers, clock, is_told_to_end=lambda: notice.given).run()
    return me.incarnation
