"""The commands `gleaner fleet ...`: make a fleet, admit and remove runs, show a fleet, and serve a fleet."""

from collections.abc import Sequence

import click
from rich.table import Table

from resources.visible_text import visible_line
from storage.clock import SystemClock
from storage.fleet.fleet_records import GIB
from storage.paths import expanded
from tasks.admitting.fleet_admission import Profile, admit_at_last, host_name
from tasks.admitting.fleet_admission import admit as admit_run
from tasks.reporting.config_argument import GivenConfig, config_argument
from tasks.reporting.finite_number import FiniteNumber
from tasks.reporting.json_output import json_output
from tasks.reporting.progress import progress
from tasks.reporting.terminal import Terminal
from tasks.sharing.fleet_ledger import FleetReport, tier_accounts
from tasks.sharing.fleet_report import account_for, as_document
from tasks.sharing.fleet_view import FleetView, look_at_fleet
from tasks.sharing.host_settings import HostSettings
from tasks.sharing.membership import create_fleet
from tasks.sharing.membership import leave as leave_fleet
from tasks.sharing.serving import serve

DAMAGED_SHOWN = 20


@click.group()
def fleet() -> None:
    """Let several runs share one trainer: a fleet's hosts train their phases in turns.

    FLEET_URL is a directory of its own, or s3://bucket/prefix.
    """


@fleet.command(short_help="Make a fleet.")
@click.argument("fleet_url")
@click.option(
    "--runs", "prefixes", multiple=True, required=True, help="Runs below this url may be admitted; repeatable."
)
@click.option(
    "--host-ttl-s", type=float, default=60.0, show_default=True, help="A host silent for so long loses its seats."
)
@click.option(
    "--slowdown-max", type=float, default=1.1, show_default=True, help="How many times as long a cycle may take."
)
@click.option(
    "--patience-s", type=float, default=3600.0, show_default=True, help="How long others pass a run that waits."
)
def init(fleet_url: str, prefixes: tuple[str, ...], host_ttl_s: float, slowdown_max: float, patience_s: float) -> None:
    """Make a fleet at FLEET_URL, to which runs below the given urls may be admitted."""
    create_fleet(fleet_url, prefixes, host_ttl_s, slowdown_max, SystemClock(), patience_s=patience_s)
    click.echo(f"{fleet_url} is a fleet now; admit runs by: gleaner fleet admit CONFIG")


@fleet.command(short_help="Admit a run to its fleet.")
@config_argument()
@click.option(
    "--share", type=float, default=1.0, show_default=True, help="The weight of its waiting against the others'."
)
@click.option("--phase-s", type=float, help="Expected seconds of a train phase. Default: the median of its reports.")
@click.option("--cycle-s", type=float, help="Expected seconds of an iteration alone. Default: that of its reports.")
@click.option(
    "--switch-s", type=FiniteNumber(min=0), help="Seconds to change the resident. Default: as the hosts measured."
)
@click.option("--dry-run", is_flag=True, help="Predict, and write nothing.")
@click.option("--wait", is_flag=True, help="If there is no room for it now, wait until there is; Ctrl-C ends it.")
def admit(
    config: GivenConfig,
    share: float,
    phase_s: float | None,
    cycle_s: float | None,
    switch_s: float | None,
    *,
    dry_run: bool,
    wait: bool,
) -> None:
    """Admit the run of a configuration file to the fleet that it names (trainer.fleet).

    A simulation of each living host predicts how much longer the cycles of its runs would take. The run is refused if,
    on every host, some run would exceed the fleet's --slowdown-max. Telling dead hosts from living hosts takes up to
    the fleet's --host-ttl-s.
    """
    settings = config.load()
    profile = Profile(share=share, phase_s=phase_s, cycle_s=cycle_s, switch_s=switch_s)
    model, clock = expanded(settings.policy.path), SystemClock()
    if wait and dry_run:
        raise ValueError("--wait: value given with --dry-run; allowed: one of them")
    with progress() as shown:
        shown.tell("looking at the fleet's hosts, and simulating each with this run")
        if wait:
            admission = admit_at_last(settings, model, profile, clock, lambda refusal: click.echo(refusal, err=True))
        else:
            admission = admit_run(settings, model, profile, clock, dry_run=dry_run)
    run = admission.run
    click.echo(
        f"{run.run_url} {'can be' if dry_run else 'is'} admitted as {run.id}: a phase of {run.phase_s:.1f} s in "
        f"{run.cycle_s:.1f} s, {run.state_bytes / GIB:.2f} GiB of host memory"
    )
    for best in admission.choices[:1]:
        click.echo(f"Predicted on {host_name(admission, best)}, times as long as alone:")
        for name, slowdown in best.slowdowns.items():
            click.echo(f"  {slowdown:.3f}  {admission.names[name]}")


@fleet.command(short_help="Take a run out of its fleet for good.")
@click.argument("fleet_url")
@click.argument("run_url")
@click.option("--reason", default="it was told to leave", show_default=True, help="For those who look at the fleet.")
def leave(fleet_url: str, run_url: str, reason: str) -> None:
    """Take a run out of a fleet for good: no host trains the run any more."""
    leave_fleet(fleet_url, run_url, reason, SystemClock())
    click.echo(f"{run_url} has left {fleet_url}")


@fleet.command(short_help="Show a fleet's runs and hosts.")
@click.argument("fleet_url")
def status(fleet_url: str) -> None:
    """Show the runs of a fleet with their hosts, and the time of each host by kind."""
    with progress() as shown:
        shown.tell("looking at the fleet")
        view = look_at_fleet(fleet_url)
    console = Terminal(width=120)
    for each in (_runs(view), _hosts(view)):
        console.print(each)
    _tell_damaged(view.damaged)


@fleet.command(short_help="Show what runs paid and saved.")
@click.argument("fleet_url")
@click.option("--as", "reader_url", metavar="RUN_URL", help="A run of yours: those below its prefix are named by url.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def report(fleet_url: str, reader_url: str | None, *, as_json: bool) -> None:
    """Show the most that sharing can save, each run's part of the hosts' hours and dollars, and each host's bill.

    "alone" is the use with a trainer of the run's own, held for all cycles of the run.
    """
    with progress(is_wanted=not as_json) as shown:
        shown.tell("reading the fleet, and the reports of its runs")
        found = account_for(fleet_url, reader_url)
    if as_json:
        click.echo(json_output(as_document(found)))
        return
    console = Terminal(width=120)
    console.print(found.verdict)
    for each in (_accounts(found), _bills(found), _tiers(found)):
        console.print(each)
    _tell_damaged(found.damaged)


@fleet.command(short_help="Serve a fleet from this machine.")
@click.argument("fleet_url")
@click.option("--memory-gib", type=FiniteNumber(), required=True, help="Host memory for the states of runs.")
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    help="It trains runs of so many ranks (trainer.nproc_per_node). Default: the GPUs that torch sees, or 1.",
)
@click.option(
    "--hours", type=FiniteNumber(), help="End at the first phase boundary after so many hours. Default: at SIGTERM."
)
@click.option(
    "--backfill-s",
    type=FiniteNumber(min=0, min_open=True),
    help="Generate responses for a run while no phase is expected for so many seconds. Default: never.",
)
@click.option("--usd-per-hour", type=FiniteNumber(), help="What this machine costs.")
@click.option(
    "--poll-interval-s",
    type=FiniteNumber(min_open=True),
    default=1.0,
    show_default=True,
    help="Between two looks at what is due.",
)
def host(
    fleet_url: str,
    memory_gib: float,
    devices: int | None,
    hours: float | None,
    backfill_s: float | None,
    usd_per_hour: float | None,
    poll_interval_s: float,
) -> None:
    """Train the phases of the fleet's runs in turns, on this machine, until SIGTERM."""
    how = HostSettings(hours=hours, poll_interval_s=poll_interval_s, backfill_s=backfill_s)
    serve(
        fleet_url,
        memory_gib=memory_gib,
        devices=devices,
        usd_per_hour=usd_per_hour,
        settings=how,
    )


def _tell_damaged(lines: Sequence[str]) -> None:
    """Print the first unreadable records, which the tables leave out."""
    for line in lines[:DAMAGED_SHOWN]:
        click.echo(f"left out: {visible_line(line)}")
    if len(lines) > DAMAGED_SHOWN:
        click.echo(f"left out: {len(lines) - DAMAGED_SHOWN} further objects")


def _runs(view: FleetView) -> Table:
    grid = Table("run", "url", "host", "load", "GiB", "ranks", title=f"runs of {view.url}")
    for run in view.runs:
        host_name = "left" if run.left else run.host or "waits for a host"
        grid.add_row(
            run.id,
            visible_line(run.run_url),
            host_name,
            f"{run.load:.2f}",
            f"{run.state_bytes / GIB:.2f}",
            str(run.ranks),
        )
    for each in view.waiting:
        grid.add_row("", visible_line(each.run_url), f"waits to be admitted, for {each.waited_s:.0f} s", "", "", "")
    return grid


def _hosts(view: FleetView) -> Table:
    grid = Table(
        "host", "machine", "devices", "state", *view.kinds, title="hosts, and seconds by what they were spent on"
    )
    for each in view.hosts:
        spent = [f"{each.spent_s[kind]:.0f}" for kind in view.kinds]
        grid.add_row(each.incarnation[:12], visible_line(each.machine), str(each.devices), each.state, *spent)
    return grid


def _accounts(found: FleetReport) -> Table:
    steps = ("iterations", "device hours each", "alone")
    titles = ("run", "host hours", "$", "alone, hours", *steps, "slowdown", "predicted", "warm")
    grid = Table(*titles, title="runs")
    for run in found.runs:
        warm = f"{run.warm} of {run.phases}"
        iterations = "unknown" if run.iterations is None else str(run.iterations)
        slowdowns = (_figure(run.slowdown, 3), _figure(run.predicted, 3))
        hours = (_figure(run.hours, 3), _figure(run.usd, 2), _figure(run.isolated_hours, 3))
        each = (_figure(run.device_hours_per_step, 3), _figure(run.isolated_device_hours_per_step, 3))
        grid.add_row(run.name, *hours, iterations, *each, *slowdowns, warm)
    return grid


def _bills(found: FleetReport) -> Table:
    grid = Table("host", "machine", "paid by", "hours", "$", title="hosts")
    for host in found.hosts:
        for run, hours in host.run_hours.items():
            place = (host.incarnation[:12], visible_line(host.machine))
            grid.add_row(*place, found.name_of(run), _figure(hours, 3), _figure(host.usd_of(run), 2))
        grid.add_row("", "", "all", _figure(host.hours, 3), _figure(host.usd, 2), end_section=True)
    return grid


def _tiers(found: FleetReport) -> Table:
    grid = Table("host", "machine", "states from", "phases", "ahead", "seconds", "GiB", title="states of runs")
    for host in found.hosts:
        for each in tier_accounts(host.restored):
            place, counts = (host.incarnation[:12], visible_line(host.machine)), (str(each.phases), str(each.ahead))
            grid.add_row(*place, each.tier, *counts, f"{each.seconds:.1f}", f"{each.num_bytes / GIB:.2f}")
    return grid


def _figure(value: float | None, digits: int) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"
