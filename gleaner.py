"""The command line for checking configurations and reading runs; for Python `open`, `train`, `rollouts` and `trl`."""

import io
import json
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.live import Live

from resources.notice import PreemptionNotice
from resources.visible_text import visible, visible_output
from storage.clock import SystemClock
from storage.errors import GleanerError
from storage.journal.retention import sweep as sweep_run
from storage.package_version import VERSION
from storage.records import canonical
from storage.records.fitness import Finding, prove
from storage.records.records import PlanRecord
from storage.records.run import connect_to_run, count_committed, read_plan
from storage.stores.connect import connect
from tasks.admitting.commands import fleet
from tasks.adopting.init_command import init
from tasks.configuration.in_force import in_force
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.run_config import RunConfig, dump, settings_digest
from tasks.doctor.doctor import doctor
from tasks.external import trl
from tasks.external.rollouts import rollouts
from tasks.forecasting.comparison import forecast as forecast_run
from tasks.forecasting.probe import NoProbe, probe_run
from tasks.forecasting.realised import compare, save_forecast
from tasks.forecasting.table import comparison_text, forecast_text
from tasks.preparing.checks import check_files, check_settings
from tasks.preparing.findings import EXPECTED, UNSURE, Refusals
from tasks.preparing.local_training import TrainingFailed, train
from tasks.regrading.regrade_command import regrade
from tasks.reporting.config_argument import GivenConfig, config_argument
from tasks.reporting.crew_view import RunView
from tasks.reporting.export_command import export
from tasks.reporting.finite_number import FiniteNumber
from tasks.reporting.interruption import command
from tasks.reporting.json_output import json_output
from tasks.reporting.metrics_outlets import Pushgateway, push, read_address, serve
from tasks.reporting.progress import progress
from tasks.reporting.run_metrics import RunMetrics
from tasks.reporting.terminal import Terminal
from tasks.reporting.watch import Watcher
from tasks.reporting.watch_screen import screen
from tasks.sampling.session.join import JoinLimits, join_run
from tasks.sampling.session.session_outcome import SessionOutcome
from tasks.serving.serve_command import serve as serve_requests
from tasks.viewing.opened_run import Run
from tasks.viewing.opened_run import open_run_at as open  # noqa: A004 - read as gleaner.open
from tasks.viewing.reading_commands import show, status, view

__all__ = ["GleanerError", "Run", "TrainingFailed", "main", "open", "rollouts", "train", "trl"]


# Of commands that write, at Ctrl-C; the others write nothing, or put a file in its place when it is whole.
_KEPT = {
    "sweep": "what it has deleted so far no run needs",
    "regrade": "it goes on after the last iteration that it has graded",
    "serve": "requests under an Idempotency-Key are answered by its next life",
    "join": "others take its responses over after rollout.claim_ttl_s",
    "fleet": "the fleet is as it was, or as it was asked for",
}


class Commands(click.Group):
    """Commands that end with status 1 and a line on stderr for each error in EXPECTED, also with a closed output.

    Ctrl-C ends with status 130 and a line.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, *EXPECTED) as error:
            if not _is_interrupted(error):
                raise
            kept = _KEPT.get(ctx.invoked_subcommand or "", "nothing is left half done")
            click.echo(f"gleaner: interrupted; {kept}; the same command again: {command(sys.argv)}", err=True)
            ctx.exit(130)

    def main(self, *arguments: Any, **options: Any) -> Any:
        _complete_streams()
        with visible_output():
            try:
                try:
                    return super().main(*arguments, **options)
                finally:
                    sys.stdout.flush()
            except EXPECTED as error:
                _discard_output()
                _refuse(error)


@click.group(cls=Commands)
@click.version_option(VERSION, prog_name="gleaner", message="%(prog)s %(version)s")
def main() -> None:
    """Gleaner: reinforcement-learning post-training on spare GPUs.

    To train: pyflyte run workflows/training.py training --config my.yaml --count 10

    CONFIG is such a YAML file; FIELD=VALUE changes one of its fields: optimizer.learning_rate=1e-6. RUN_URL is its
    run.url: a directory, or s3://bucket/prefix.
    """


@main.command(short_help="Check a configuration file, or test a store.")
@config_argument(required=False)
@click.option("--resolved", is_flag=True, help="Print the whole configuration with all defaults, as YAML.")
@click.option("--files", is_flag=True, help="Also open the model, prompts and functions that it names.")
@click.option("--store", "store_url", metavar="URL", help="Test a store instead: can it create objects atomically?")
@click.option(
    "--keys", type=click.IntRange(min=1), default=100, show_default=True, help="With --store: how thorough the test is."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def check(
    config: GivenConfig | None, resolved: bool, files: bool, store_url: str | None, keys: int, as_json: bool
) -> None:
    """Check a configuration file (CONFIG), or test whether a store can hold a run (--store URL)."""
    if config is not None and store_url is None and not (resolved and as_json):
        _check_config(config, resolved=resolved, files=files, as_json=as_json)
    elif config is None and store_url is not None and not resolved and not files:
        _check_store(store_url, keys, as_json=as_json)
    else:
        raise ValueError("check: allowed: CONFIG [--resolved | --json] [--files], or --store URL [--keys N] [--json]")


def _check_config(config: GivenConfig, *, resolved: bool, files: bool, as_json: bool) -> None:
    settings = config.load()
    looked_at = []
    if files:
        with progress(is_wanted=not as_json) as shown:
            looked_at = check_files(settings, shown.tell)
    else:
        check_settings(settings)
    if as_json:
        click.echo(json_output({"config": str(config), "settings": dump(settings), "looked_at": looked_at}))
        return
    prices = [pool.price_usd_per_h for pool in (settings.pools.rollout, settings.pools.train)]
    for line in looked_at:
        # With --resolved, standard output holds the configuration and nothing else.
        click.echo(line if line.startswith(UNSURE) else f"looked at {line}", err=resolved)
    if resolved:
        click.echo(in_force(dump(settings)), nl=False)
        return
    number, digest = settings.run.num_prompts_per_step, settings_digest(settings)
    if settings.algorithm.learns_examples:
        work = f"{number} {'pairs of ' * settings.algorithm.learns_pairs}examples per iteration"
    else:
        crew = f"{settings.pools.rollout.count} slots at {prices[0]:.2f} $/h"
        work = f"{number} prompts x {settings.run.num_generations} responses per iteration on {crew}"
    if settings.run.from_ is not None:
        work += f", beginning with {settings.run.from_}"
    click.echo(f"{config} is a valid run configuration: {work}, trainer at {prices[1]:.2f} $/h; settings {digest}")


def _check_store(url: str, keys: int, *, as_json: bool) -> None:
    findings = []
    with closing(prove(connect(url), keys=keys)) as proof, progress(is_wanted=not as_json) as shown:
        shown.tell(f"testing {url}")
        for finding in proof:
            findings.append(finding)
            if not as_json:
                shown.say(_finding_line(finding))
    lacking = [finding.name for finding in findings if finding.lack]
    if as_json:
        click.echo(json_output({"store": url, "fit": not lacking, "findings": [asdict(each) for each in findings]}))
    else:
        click.echo(f"{url} is not fit; lacking: {', '.join(lacking)}" if lacking else f"{url} is fit")
    sys.exit(1 if lacking else 0)


@main.command(short_help="Estimate hours and dollars of a run.")
@config_argument(required=False)
@click.option("--save", is_flag=True, help="Also write the forecast into the run's directory.")
@click.option("--no-probe", is_flag=True, help="Ignore what the run has measured so far.")
@click.option("--realised", "run_url", metavar="RUN_URL", help="Compare a saved forecast with what happened instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def forecast(config: GivenConfig | None, save: bool, no_probe: bool, run_url: str | None, as_json: bool) -> None:
    """Estimate the hours and dollars of a run on several setups and recommend one. Needs no GPU and no weights."""
    if config is not None and run_url is None:
        _forecast_run(config.load(), save=save, no_probe=no_probe, as_json=as_json)
    elif run_url is not None and config is None and not save and not no_probe:
        with progress(is_wanted=not as_json) as shown:
            shown.tell("reading reports")
            comparison = compare(connect_to_run(run_url))
        width = Terminal().width if sys.stdout.isatty() else 120
        click.echo(json_output(comparison) if as_json else comparison_text(comparison, width), nl=as_json)
    else:
        raise ValueError("forecast: allowed: CONFIG [--save] [--no-probe] [--json], or --realised URL [--json]")


def _forecast_run(settings: RunConfig, *, save: bool, no_probe: bool, as_json: bool) -> None:
    with progress(is_wanted=not as_json) as shown:
        shown.tell("reading what the run has measured")
        probe = NoProbe(reason="--no-probe") if no_probe else probe_run(settings.run.url)
        record = forecast_run(settings, probe, SystemClock().wall(), shown.tell)
    width = Terminal().width if sys.stdout.isatty() else 150
    text = json_output(json.loads(canonical.encode(record))) if as_json else forecast_text(record, width)
    click.echo(text, nl=as_json)
    if save:
        # Last, so that the forecast is shown even if it cannot be written.
        click.echo(f"written: {save_forecast(connect(settings.run.url), record)}", err=True)


@main.command(short_help="Show the iteration in progress.")
@click.argument("run_url")
@click.option("--once", is_flag=True, help="Look once and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print each look as one line of JSON.")
@click.option(
    "--interval-s", type=FiniteNumber(min=0.1), default=2.0, show_default=True, help="Seconds between two looks."
)
@click.option("--serve", "address", metavar="[HOST:]PORT", help="Serve metrics for Prometheus instead.")
@click.option("--push", "gateway", metavar="URL", help="Push metrics to a Pushgateway instead.")
def watch(run_url: str, once: bool, as_json: bool, interval_s: float, address: str | None, gateway: str | None) -> None:
    """Show the iteration in progress: the working members, the progress, and the trainer's waiting.

    Goes on to the next iteration until Ctrl-C. Writes nothing to the run.
    """
    with suppress(KeyboardInterrupt):
        if address is not None or gateway is not None:
            _give_metrics(run_url, address, gateway, interval_s, once=once, as_json=as_json)
            return
        watcher = Watcher((connect_to_run if once else connect)(run_url), SystemClock())
        _display([watcher.look()] if once else watcher.looks(interval_s), as_json=as_json)


def _give_metrics(
    run_url: str, address: str | None, gateway: str | None, interval_s: float, *, once: bool, as_json: bool
) -> None:
    if as_json or (address is not None and (gateway is not None or once)):
        raise ValueError("watch: allowed: [--json] [--once], --serve [HOST:]PORT, or --push URL [--once]")
    where = None if address is None else read_address(address)
    target = None if gateway is None else Pushgateway(gateway, connect(run_url).url)
    metrics = RunMetrics((connect_to_run if once else connect)(run_url), SystemClock())
    if where is not None:
        serve(metrics.looks(interval_s), where, lambda line: click.echo(line, err=True))
    elif target is not None and once:
        target.push(metrics.look())
    elif target is not None:
        push(metrics.looks(interval_s), target, lambda line: click.echo(line, err=True))


@main.command(short_help="Generate responses for a run on this machine.")
@click.argument("run_url")
@click.option("--iterations", type=click.IntRange(min=1), help="Leave after helping with this many iterations.")
@click.option("--time-limit-s", type=FiniteNumber(min=0, min_open=True), help="Leave after this many seconds.")
@click.option(
    "--patience-s",
    type=FiniteNumber(min=0),
    help="Leave after this many seconds without work; by default after 1800 for a run that has not begun, and after "
    "run.lease_ttl_s without a sign of life of one that has.",
)
@click.option("--usd-per-hour", type=FiniteNumber(min=0), help="Price of this machine, for the report.")
@click.option(
    "--run-tools",
    multiple=True,
    metavar="MODULE",
    help="A module, or module:function, that may run here if the run's turns name it; may be given several times.",
)
def join(
    run_url: str,
    iterations: int | None,
    time_limit_s: float | None,
    patience_s: float | None,
    usd_per_hour: float | None,
    run_tools: tuple[str, ...],
) -> None:
    """Help a run from this machine, without Flyte: generate responses until Ctrl-C.

    Needs access to the run's store. At Ctrl-C or SIGTERM the member writes its tokens, leaves unfinished responses to
    the run, and exits with 0.
    """
    limits = JoinLimits(iterations=iterations, time_limit_s=time_limit_s, patience_s=patience_s)
    with PreemptionNotice() as notice:
        signal.signal(signal.SIGINT, lambda *_: _interrupted(notice))
        with progress() as shown:
            shown.tell(f"helping {run_url}; Ctrl-C to leave")
            helped = join_run(
                *(run_url, limits, lambda: notice.given, SystemClock()),
                usd_per_hour=usd_per_hour,
                run_tools=run_tools,
                tell=shown.say,
                report=lambda plan, outcome: shown.say(_outcome_line(plan, outcome)),
            )
    click.echo(f"left after helping with {helped} iteration{'s' * (helped != 1)}")


def _is_interrupted(error: BaseException | None) -> bool:
    """True for Ctrl-C, and for an error raised during the clean-up after Ctrl-C."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or _is_interrupted(error.__context__))


_LEAVING = (
    b"leaving: writes its tokens, which the run keeps, and hands the rest over; the same command joins again (Ctrl-C "
    b"again: at once)\n"
)


def _interrupted(notice: PreemptionNotice) -> None:
    """Let the member write its tokens and leave at the first Ctrl-C; the second Ctrl-C ends the process at once."""
    notice.give()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A handler may not use the streams that it may have interrupted.
    os.write(sys.stderr.fileno(), _LEAVING)


def _outcome_line(plan: PlanRecord, outcome: SessionOutcome) -> str:
    return (
        f"iteration {plan.iteration}: {outcome.tokens_generated} tokens, {outcome.responses_finished} responses ended, "
        f"{outcome.tokens_recovered} tokens taken over"
    )


@main.command(short_help="Delete what a run no longer needs.")
@click.argument("run_url")
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")
def sweep(run_url: str, dry_run: bool) -> None:
    """Free space: delete old weights, checkpoints and working files, as the section `retention` says."""
    store = connect_to_run(run_url)
    current = count_committed(store)
    if not current:
        click.echo(f"{run_url} holds no committed iteration; nothing to do")
        return
    config = config_in_force(store, read_plan(store, current - 1)).retention
    with progress() as shown:
        swept = sweep_run(store, config, dry_run=dry_run, progress=shown.tell)
    would = "would have " if dry_run else ""
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(swept.counts().items()))
    click.echo(f"{would}compacted {len(swept.compacted)} iterations")
    click.echo(f"{would}deleted {len(swept.deleted)} objects{f': {counts}' if counts else ''}")
    for problem in swept.problems:
        click.echo(f"left as it is: {problem}", err=True)
    sys.exit(1 if swept.problems else 0)


def _finding_line(finding: Finding) -> str:
    return f"{finding.name}: LACKING: {finding.lack}" if finding.lack else f"{finding.name}: {finding.shown}"


def _display(views: Iterable[RunView], *, as_json: bool) -> None:
    """Show each look in place of the previous look on a terminal, and below the previous look elsewhere."""
    if as_json:
        for view in views:
            click.echo(json_output(view))
        return
    console = Terminal(width=None if sys.stdout.isatty() else 120)
    if not console.is_terminal:
        for view in views:
            console.print(screen(view, console.width))
        return
    with Live(console=console, auto_refresh=False) as live:
        for view in views:
            live.update(screen(view, console.width), refresh=True)


def _refuse(error: BaseException) -> NoReturn:
    # The reader of a pipe that is closed early has what it wanted, and needs no line about that.
    if not isinstance(error, BrokenPipeError):
        refusals = error.errors if isinstance(error, Refusals) else (error,)
        for line in (*map(str, refusals), *getattr(error, "__notes__", ())):
            # click leaves escapes out where there is no terminal; the reader is to see them.
            click.echo(f"gleaner: {visible(line)}", err=True)
    sys.exit(1)


def _complete_streams() -> None:
    """Give a process without standard output or error a stream to /dev/null; both streams escape unknown characters."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open until the end
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Discard the buffer of a standard output that cannot be written; Python would try to write again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


for each in (doctor, export, fleet, init, regrade, serve_requests, status, show, view):
    main.add_command(each)

if __name__ == "__main__":
    main()
