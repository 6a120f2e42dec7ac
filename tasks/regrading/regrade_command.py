"""The command `gleaner regrade`: a run's stored responses, graded with the rewards of a configuration."""

import sys

import click

from storage.records.run import connect_to_run
from tasks.regrading.regrading import regrade_and_compare
from tasks.regrading.reward_change import TEXT_WIDTH, change_text
from tasks.reporting.config_argument import GivenConfig, config_argument
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
    settings = config.load()
    store = connect_to_run(settings.run.url if run_url is None else run_url)
    with progress(is_wanted=not as_json) as shown:
        graded, change = regrade_and_compare(store, settings, iterations, named, shown.tell)
    if as_json:
        click.echo(json_output(change))
        return
    click.echo(change_text(change, Terminal().width if sys.stdout.isatty() else TEXT_WIDTH))
    ended = f"graded {len(graded)} of {len(change.iterations)} iterations now"
    click.echo(f"{ended}; responses(n, grading={named!r}) reads them")
