"""The command line: look at configurations and runs. Training is `pyflyte run workflows/training.py training`."""

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from storage.connect import connect
from storage.records import ReportRecord
from storage.run import reports
from storage.store import StorageError
from tasks.configuration.run_config import ConfigError, RunConfig, dump, load
from tasks.grading.grader import Grader
from tasks.grading.reward import GradingError
from tasks.learning.pretrained import ModelError, check_model
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptError

COLUMNS = (
    ("reward", "reward", "{:.3f}"),
    ("mean length", "completions/mean_length", "{:.1f}"),
    ("max length", "completions/max_length", "{:.0f}"),
    ("tokens", "num_tokens", "{:.0f}"),
    ("recovered", "resume/tokens_recovered", "{:.0f}"),
    ("regenerated", "resume/tokens_regenerated", "{:.0f}"),
    ("losses", "preempt/count", "{:.0f}"),
    ("seconds", "timing_s/iteration", "{:.1f}"),
    ("dollars", "cost/usd_iter", "{:.5f}"),
)
EXPECTED = (ConfigError, ModelError, PromptError, GradingError, StorageError, LookupError, ValueError)


@click.group()
def main() -> None:
    """Gleaner: reinforcement-learning post-training on spare GPUs."""


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--resolved", is_flag=True, help="Print the whole configuration with its defaults, as JSON.")
@click.option("--files", is_flag=True, help="Also open the model, the prompts and the rewards it names.")
def check(config: Path, resolved: bool, files: bool) -> None:
    """Validate a run configuration without running or creating anything."""
    try:
        settings = load(config)
        prices = [pool.price_usd_per_h for pool in (settings.pools.rollout, settings.pools.train)]
        if files:
            _check_files(settings)
    except EXPECTED as error:
        _refuse(error)
    if resolved:
        click.echo(json.dumps(dump(settings), indent=2))
        return
    click.echo(
        f"{config} is a valid run configuration: {settings.run.num_prompts_per_step} prompts x "
        f"{settings.run.num_generations} responses per iteration on {settings.pools.rollout.count} slots "
        f"at {prices[0]:.2f} $/h, trainer at {prices[1]:.2f} $/h"
    )


@main.command()
@click.argument("run_url")
def status(run_url: str) -> None:
    """Show the committed iterations of a run."""
    try:
        history = reports(connect(run_url))
    except EXPECTED as error:
        _refuse(error)
    if not history:
        click.echo(f"{run_url} holds no committed iteration")
        return
    Console(width=None if sys.stdout.isatty() else 120).print(table(history))


def table(history: list[ReportRecord]) -> Table:
    """One row per iteration: what was learned, what it took."""
    grid = Table("iteration", *(title for title, _, _ in COLUMNS), title="committed iterations")
    for report in history:
        cells = [form.format(report.metrics.get(name, float("nan"))) for _, name, form in COLUMNS]
        grid.add_row(str(report.iteration), *cells)
    return grid


def _check_files(settings: RunConfig) -> None:
    check_model(Path(settings.policy.path).expanduser())
    prompts = load_prompts(settings.data)
    with Grader(settings.rewards) as grader:
        grader.check_columns(prompts.columns)


def _refuse(error: Exception) -> None:
    click.echo(f"gleaner: {error}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
