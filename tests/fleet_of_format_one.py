"""The records of a small fleet of format 1, always with the same content; see tests/format_one.py."""

from dataclasses import replace

from storage.fleet import fleet_layout
from storage.fleet.fleet_records import (
    AdmittedRun,
    FleetRecord,
    HostBeat,
    HostRecord,
    LeftRecord,
    Prediction,
    SeatRecord,
    WaitingRun,
)
from storage.fleet.spent_records import RestoredState, SpentEntry, SpentRecord
from storage.records import records

HOST, WAITING = "a1c09d2f5b7e8833", "5d20c7a94e1b6f08"
RUN_URL = "s3://bucket/run"
NONCE = {"nonce": "0123456789abcdef0123456789abcdef"}


def of_the_fleet() -> dict[str, records.AnyRecord]:
    """The records of a fleet to which the run is admitted, by their keys below the fleet's root."""
    run, entry = (
        fleet_layout.run_id(RUN_URL),
        SpentEntry(kind="idle", run=None, iteration=None, began_s=0.0, ended_s=4.5),
    )
    return {
        fleet_layout.FLEET: FleetRecord(run_prefixes=("s3://bucket",), host_ttl_s=60.0, created_at_s=1.0, **NONCE),
        fleet_layout.admitted(run): AdmittedRun(
            id=run,
            run_url=RUN_URL,
            phase_s=60.0,
            cycle_s=300.0,
            state_bytes=1 << 30,
            admitted_at_s=2.0,
            share=2.0,
            rollouts_ahead=1,
            rollout_gpus=8,
            trainer_gpus=4,
            ranks=4,
            predicted=Prediction(host=HOST, slowdowns={run: 1.0625}),
            **NONCE,
        ),
        fleet_layout.left(run): LeftRecord(id=run, reason="it has ended", left_at_s=9.0, **NONCE),
        fleet_layout.seat(run, 1): SeatRecord(run=run, epoch=1, host=HOST, **NONCE),
        fleet_layout.host(HOST): HostRecord(
            incarnation=HOST,
            machine="a-machine",
            memory_bytes=1 << 36,
            disk_bytes=1 << 38,
            devices=4,
            usd_per_hour=24.5,
            began_at_s=1.5,
            version="0.1.0",
            **NONCE,
        ),
        fleet_layout.alive(HOST): HostBeat(
            incarnation=HOST, sequence=3, resident=run, iteration=0, lived_s=30.25, state="training"
        ),
        fleet_layout.waiting(WAITING): WaitingRun(
            incarnation=WAITING, sequence=2, run_url="s3://bucket/next", waited_s=20.5, state="waiting"
        ),
        fleet_layout.spent(HOST, 0): SpentRecord(
            host=HOST,
            sequence=0,
            entries=(entry, replace(entry, kind="train", run=run, iteration=0, began_s=4.5, ended_s=30.0)),
            seated=(run,),
            restored=(
                RestoredState(run=run, iteration=0, tier="local disk", ahead=True, seconds=2.5, num_bytes=1 << 30),
            ),
        ),
    }
