"""The command `gleaner regrade`: a run's stored responses, graded with the rewards of a configuration."""

import sys

import click

from storage.records.gradings import check_name
from storage.records.run import connect_to_run, count_committed
from tasks.regrading.regrading import regrade as regrade_iterations
from tasks.regrading.reward_change import compare, group_line, table
from tasks.reporting.config_argument import GivenConfig, config_argument
from tasks.reporting.export import parse_range
from tasks.reporting.json_output import json_output
from tasks.reporting.progress import progress
from tasks.reporting.terminal import Terminal


@click.command(short_help="Grade a run's stored responses again.")
@config_argument()
@click.option("--run", "run_url", metavar="URL", help="The run. Default: run.url of CONFIG.")
@click.option("--iterations", default=":", help="a:b (without b), a:, :b or a. Default: all that are committed.")
@click.option("--name", help="The name of the grading. Default: that of CONFIG, without its ending.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def regrade(config: GivenConfig, run_url: str | None, iterations: str, name: str | None, as_json: bool) -> None:
    """Grade stored responses with the rewards of CONFIG, without a model or a GPU.

    Writes gradings/NAME/ in the run's directory, and compares the grading with the recorded rewards, which stay as they
    are. Iterations that NAME has are not graded again.
    """
    named = config.path.stem if name is None else name
    check_name(named)
    settings = config.load()
    store = connect_to_run(settings.run.url if run_url is None else run_url)
    count = count_committed(store)
    if not count:
        raise LookupError(f"{store.url} holds no committed iteration; allowed: a run with one")
    chosen = parse_range(iterations, count)
    with progress(is_wanted=not as_json) as shown:
        graded = regrade_iterations(store, settings, chosen, named, shown.tell)
        change = compare(store, named, chosen, shown.tell)
    if as_json:
        click.echo(json_output(change))
        return
    Terminal(width=None if sys.stdout.isatty() else 120).print(table(change))
    click.echo(group_line(change))
    click.echo(f"graded {len(graded)} of {len(chosen)} iterations now; responses(n, grading={named!r}) reads them")
