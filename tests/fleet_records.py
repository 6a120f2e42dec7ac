"""Records of a fleet for tests."""

from collections.abc import Mapping
from typing import Any

from storage.clock import ManualClock
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import AdmittedRun, FleetRecord, HostBeat, HostRecord
from storage.records import records
from storage.stores.store import ObjectStore

TTL_S = 30.0
FLEET = FleetRecord(run_prefixes=("memory://runs",), host_ttl_s=TTL_S, created_at_s=0.0)


def a_run(name: str, **fields: Any) -> AdmittedRun:
    """A run at memory://runs/<name>; a third of a trainer's time unless `fields` say otherwise."""
    url = f"memory://runs/{name}"
    usual = {"phase_s": 10.0, "cycle_s": 30.0, "state_bytes": 1, "admitted_at_s": 0.0}
    return AdmittedRun(id=fleet_layout.run_id(url), run_url=url, **usual | fields)


def a_host(name: str, memory_bytes: int = 100, devices: int = 1) -> HostRecord:
    return HostRecord(
        incarnation=name,
        machine="a-machine",
        memory_bytes=memory_bytes,
        devices=devices,
        usd_per_hour=None,
        began_at_s=0.0,
    )


def a_beat(name: str, sequence: int, state: Any = "idle") -> HostBeat:
    return HostBeat(incarnation=name, sequence=sequence, resident=None, iteration=None, lived_s=0.0, state=state)


class BeatingClock(ManualClock):
    """Hosts beat while a process sleeps by this clock: each of `beating` in its state."""

    def __init__(self, store: ObjectStore, beating: Mapping[str, str]) -> None:
        super().__init__(1000.0)
        self.store, self.beating, self.beats = store, beating, 1

    def sleep(self, duration_s: float) -> None:
        super().sleep(duration_s)
        self.beats += 1
        for name, state in self.beating.items():
            records.put(self.store, fleet_layout.alive(name), a_beat(name, self.beats, state))
