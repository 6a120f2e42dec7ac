"""Reads a fleet and its runs' reports into one account."""

from dataclasses import asdict
from typing import Any

from storage.fleet_reading import has_left, last_beat, read_hosts, read_run, read_spent, run_ids
from tasks.sharing.fleet_ledger import (
    FleetReport,
    bound_of,
    host_account,
    predicted_slowdowns,
    readable_reports,
    run_account,
    tier_accounts,
)
from tasks.sharing.membership import open_fleet


def account_for(url: str, reader_url: str | None = None) -> FleetReport:
    """Account for a fleet. Runs below the same prefix of the fleet as `reader_url` are called by their urls.

    All others are called by their ids. Without `reader_url` all runs have their urls if the fleet has one prefix only,
    and ids otherwise. Raises LookupError if there is no fleet, CorruptObject, ValueError for records of a host that
    leave out a second, and what the store raises. A run whose directory cannot be read has unknown figures.
    """
    store, fleet = open_fleet(url)
    if reader_url is None:
        reader_url = fleet.run_prefixes[0] if len(fleet.run_prefixes) == 1 else ""
    runs = [read_run(store, each) for each in run_ids(store)]
    shares = {run.id: run.share for run in runs}
    hosts = []
    for host in read_hosts(store):
        beat, spent = last_beat(store, host.incarnation), read_spent(store, host.incarnation)
        hosts.append(host_account(host, beat, spent, shares))
    predicted = predicted_slowdowns(runs)
    present = [run for run in runs if not has_left(store, run.id)]
    return FleetReport(
        url=store.url,
        bound=bound_of(present, sum(not host.is_gone for host in hosts)),
        hosts=hosts,
        runs=[
            run_account(run, fleet.name_for(reader_url, run), hosts, readable_reports(run), predicted.get(run.id))
            for run in runs
        ],
    )


def as_document(found: FleetReport) -> dict[str, Any]:
    """The same as JSON has it; what no run pays is under "the fleet", and each run under its name."""
    hosts = [
        {
            "incarnation": host.incarnation,
            "machine": host.machine,
            "hours": host.hours,
            "usd": host.usd,
            "paid_by": [
                {"name": found.names[run], "hours": hours, "usd": host.usd_of(run)}
                for run, hours in host.run_hours.items()
            ],
            "tiers": [asdict(each) for each in tier_accounts(host.restored)],
        }
        for host in found.hosts
    ]
    runs = [
        {
            **asdict(run),
            "device_hours_per_step": run.device_hours_per_step,
            "isolated_device_hours_per_step": run.isolated_device_hours_per_step,
        }
        for run in found.runs
    ]
    return {"fleet": found.url, "bound": found.bound, "verdict": found.verdict, "hosts": hosts, "runs": runs}
