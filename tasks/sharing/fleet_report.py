"""Reads a fleet, and the reports of its runs, into one account."""

from dataclasses import asdict
from typing import Any

from storage.fleet.fleet_reading import FleetReader, has_left
from tasks.sharing.billing import without_gaps
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
    """Account for a fleet.

    Runs below a prefix of `reader_url` are named by url, and the remaining runs by id. Without `reader_url` a fleet
    with a single prefix names all runs by url, a fleet with more prefixes all by id.

    An unreadable record is left out: a run without a readable admission has no line and a share of 1, and unrecorded
    time of a host is paid by no run. A run with an unreadable directory has unknown figures.

    Raises LookupError if there is no fleet, CorruptObject for unreadable rules of the fleet, and the store's errors.
    """
    store, fleet = open_fleet(url)
    reader = FleetReader(store, fleet)
    if reader_url is None:
        reader_url = fleet.run_prefixes[0] if len(fleet.run_prefixes) == 1 else ""
    runs = reader.runs()
    shares = {run.id: run.share for run in runs}
    hosts = []
    for host in reader.hosts():
        spent, unfit = without_gaps(reader.spent(host.incarnation))
        reader.damaged += (f"object {each.key!r}: its times do not follow on those before" for each in unfit)
        hosts.append(host_account(host, reader.beat(host.incarnation), spent, shares))
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
        damaged=reader.damaged,
    )


def as_document(found: FleetReport) -> dict[str, Any]:
    """The account as a JSON document: each run under its name, and hours that no run pays under "the fleet"."""
    hosts = [
        {
            "incarnation": host.incarnation,
            "machine": host.machine,
            "hours": host.hours,
            "usd": host.usd,
            "paid_by": [
                {"name": found.name_of(run), "hours": hours, "usd": host.usd_of(run)}
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
    return {
        "fleet": found.url,
        "bound": found.bound,
        "verdict": found.verdict,
        "hosts": hosts,
        "runs": runs,
        "damaged": list(found.damaged),
    }
