"""Serving a fleet: a host with processes for workers and a member on this machine, from start to end."""

import logging
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from resources.local_starter import StartedProcess, running_starter
from resources.notice import PreemptionNotice
from resources.visible_text import show_logs
from storage.clock import SystemClock
from storage.fleet.fleet_records import GIB, HostRecord
from storage.records.records import nonce
from tasks.device.visible_gpus import visible_gpus
from tasks.sharing.host import Host
from tasks.sharing.host_settings import HostSettings
from tasks.sharing.membership import open_fleet
from tasks.sharing.process_workers import ProcessWorkers

log = logging.getLogger(__name__)
MEMBER_PROGRAM = Path(__file__).parents[2] / "gleaner.py"
# Arrow imports pandas for its first array.
MEMBER_IMPORTS = (
    "tasks.sampling.session.join",
    "tasks.sampling.engines.torch_engine",
    "transformers.modeling_utils",
    "pandas",
)
MEMBER_END_LIMIT_S = 60.0


class ProcessMember:
    """See `tasks.sharing.workers.BackfillMember`: `gleaner join`, in a process that the host's starter forks.

    The member has no price: the host's bill has the seconds.
    """

    def __init__(self) -> None:
        self._process: StartedProcess | None = None

    @property
    def is_running(self) -> bool:
        if self._process is None:
            return False
        try:
            code = self._process.wait(0)
        except TimeoutError:
            return True
        if code:
            log.warning("the member that generated on this host ended with %d", code)
        self._process = None
        return False

    def start(self, run_url: str) -> None:
        environment = dict(os.environ)
        self._process = running_starter(environment).start(
            [str(MEMBER_PROGRAM), "join", run_url], environment, MEMBER_IMPORTS
        )

    def notice(self) -> None:
        if self._process is not None:
            self._process.end()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(TimeoutError):
                self._process.wait(MEMBER_END_LIMIT_S)
            self._process = None


def serve(
    fleet: str,
    *,
    memory_gib: float,
    devices: int | None = None,
    usd_per_hour: float | None,
    settings: HostSettings,
    is_over: Callable[[], bool] | None = None,
) -> str:
    """Serve a fleet until SIGTERM comes or the hours of the settings are over; ends at a phase boundary.

    Args:
        fleet: The url of the fleet.
        memory_gib: Room for resident states in host memory, GiB.
        devices: As in `HostRecord`. None: the number of GPUs that torch sees, or 1.
        usd_per_hour: The price of this machine; None: unknown.
        settings: Intervals and limits of the host.
        is_over: Given for a fleet of one host: True if the fleet needs no host any more. The host then ends without
            waiting for a phase on the devices, as a train task does, but waits for a publication under way.

    Returns the incarnation of the host. Raises LookupError if there is no fleet, ValueError for a negative room.
    """
    show_logs()
    clock = SystemClock()
    store, rules = open_fleet(fleet)
    me = HostRecord(
        incarnation=nonce(),
        machine=socket.gethostname(),
        memory_bytes=round(memory_gib * GIB),
        devices=devices or max(1, visible_gpus().count),
        usd_per_hour=usd_per_hour,
        began_at_s=clock.wall(),
    )
    with PreemptionNotice() as notice, ExitStack() as stack:
        workers = stack.enter_context(ProcessWorkers())
        member = ProcessMember()
        stack.callback(member.kill)

        def is_told_to_end() -> bool:
            if is_over is None:
                return notice.given
            told = notice.given or is_over()
            if told:
                workers.kill_on_device()
            return told

        Host(store, rules, me, settings, workers, clock, member=member, is_told_to_end=is_told_to_end).run()
    return me.incarnation
