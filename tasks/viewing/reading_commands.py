"""The commands that read a run: `gleaner status` and `gleaner show` in a terminal, `gleaner view` in a browser."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import click

from storage.clock import SystemClock
from storage.records.evaluations import evaluations
from storage.records.failures import last_failures
from storage.records.run import connect_to_run, read_run, reports
from tasks.reporting.conclusion import cut_line
from tasks.reporting.costs import usd_per_reward_point
from tasks.reporting.evaluation_tab import evaluation_line
from tasks.reporting.json_output import json_output
from tasks.reporting.last_failures import failure_lines
from tasks.reporting.nonfinite import nonfinite_line
from tasks.reporting.progress import progress
from tasks.reporting.terminal import Terminal
from tasks.viewing.page_file import write_page
from tasks.viewing.run_reader import TOKENS_AT_ONCE, RunReader
from tasks.viewing.run_status import status_data, table
from tasks.viewing.run_summary import lineage_facts
from tasks.viewing.terminal_view import print_response, token_lines


@click.command(short_help="Show the finished iterations of a run.")
@click.argument("run_url")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with all metrics.")
def status(run_url: str, as_json: bool) -> None:
    """Show what failed last in a run, its lineage, finished iterations and evaluations, and a step not finite."""
    store = connect_to_run(run_url)
    with progress(is_wanted=not as_json) as progress_line:
        history, evaluated, stopped = reports(store, progress_line.tell), evaluations(store), nonfinite_line(store)
        failed, lineage = last_failures(store, len(history)), lineage_facts(read_run(store))
    if as_json:
        click.echo(json_output(status_data(store.url, history, evaluated, failed, stopped) | {"lineage": lineage}))
        return
    for line in failure_lines(store, failed):
        click.echo(line)
    for name, origin in lineage.items():
        click.echo(f"{name}: {origin}")
    if history:
        Terminal(width=None if sys.stdout.isatty() else 120).print(table(history))
        cut = cut_line(history[0])
        if cut is not None:
            click.echo(cut)
        point_usd = usd_per_reward_point(history)
        if point_usd:
            click.echo(f"dollars so far per point of mean reward gained since iteration 0: {point_usd:.5f}")
    else:
        click.echo(f"{run_url} holds no committed iteration yet")
    for record in evaluated:
        click.echo(evaluation_line(record))
    if stopped is not None:
        click.echo(stopped)


@click.command(short_help="Show one response of a run.")
@click.argument("run_url")
@click.argument("iteration", type=click.IntRange(min=0))
@click.argument("response", type=click.IntRange(min=0))
@click.option("--tokens", is_flag=True, help="List the tokens with their log-probs instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(run_url: str, iteration: int, response: int, tokens: bool, as_json: bool) -> None:
    """Show the prompt and the text of one response, the rewards, and the process that generated each part.

    ITERATION and RESPONSE are numbers from 0. The iteration may still be under way.
    """
    with progress(is_wanted=not as_json) as progress_line:
        progress_line.tell(f"reading response {response} of iteration {iteration}")
        reader = RunReader(connect_to_run(run_url)).iteration(iteration)
        view, index = reader.view(response), reader.index()
        pieces = range(0, view.tokens, TOKENS_AT_ONCE) if tokens else ()
        listed = [each for first in pieces for each in reader.tokens(response, first)]
    if tokens:
        if as_json:
            click.echo(json_output([{"text": text, "logprob": logprob} for text, logprob in listed]))
        else:
            click.echo("\n".join(token_lines(listed, 0)))
    elif as_json:
        click.echo(json_output(view))
    else:
        print_response(Terminal(width=None if sys.stdout.isatty() else 120), view, index)


@click.command(short_help="Show a run and its responses in the browser.")
@click.argument("run_url")
@click.option("--to", "file", type=click.Path(path_type=Path), help="Write one HTML file instead of serving the page.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8471,
    show_default=True,
    help="Port on 127.0.0.1; 0: any that is free.",
)
def view(run_url: str, file: Path | None, port: int) -> None:
    """Serve a page about a run: its charts, its iterations, and every response. Until Ctrl-C.

    Prints the address, which carries a token. Writes nothing to the run.
    """
    reader = RunReader(connect_to_run(run_url))
    if file is None:
        with suppress(KeyboardInterrupt):
            asyncio.run(_serve(reader, port))
        return
    with progress() as progress_line:
        progress_line.tell("reading responses, and writing the page")
        done = write_page(reader, file, SystemClock())
    of = f" of iterations {done.iterations[0]} to {done.iterations[-1]}" if done.iterations else ""
    click.echo(f"{done.path}: {done.responses:,} responses{of}, {done.num_bytes:,} bytes")


async def _serve(reader: RunReader, port: int) -> None:
    from tasks.viewing.page_server import PageServer  # noqa: PLC0415 - its library takes longer than most commands

    server = PageServer(reader, SystemClock(), port)
    runner = await server.start()
    try:
        click.echo(f"open {server.address} (Ctrl-C ends)")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
