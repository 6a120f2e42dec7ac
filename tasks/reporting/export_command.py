"""The command `gleaner export`: the responses, the model or the adapter of a run, as files for other programs."""

from collections.abc import Mapping
from pathlib import Path

import click

from storage.clock import SystemClock
from storage.records.run import connect_to_run
from tasks.reporting.export import export_rollouts
from tasks.reporting.export_adapter import export_adapter
from tasks.reporting.export_model import DTYPES, STORED, export_model
from tasks.reporting.progress import progress

# What can be exported, and how the options of each are written.
EXPORTS = {
    "--rollouts": {"--iterations": "--iterations a:b", "--grading": "--grading NAME", "--overwrite": "--overwrite"},
    "--model": {"--version": "--version N", "--dtype": "--dtype D"},
    "--adapter": {"--version": "--version N"},
}


@click.command(short_help="Export the model or the responses of a run.")
@click.argument("run_url")
@click.option("--rollouts", is_flag=True, help="Export responses, with tokens, log-probs and rewards, as Parquet.")
@click.option("--model", is_flag=True, help="Export the model as a Hugging Face directory.")
@click.option("--adapter", is_flag=True, help="Export the LoRA adapter as a PEFT folder.")
@click.option("--to", "folder", type=click.Path(path_type=Path), required=True, help="The folder to write to.")
@click.option("--iterations", help="With --rollouts: a:b (without b), a:, :b or a. Default: all.")
@click.option(
    "--grading", help="With --rollouts: with the rewards of this grading by `gleaner regrade`.", metavar="NAME"
)
@click.option("--overwrite", is_flag=True, help="With --rollouts: replace existing files.")
@click.option(
    "--version", type=click.IntRange(min=0), help="With --model or --adapter: weight version. Default: newest."
)
@click.option(
    "--dtype", type=click.Choice([STORED, *DTYPES]), help="With --model: convert to this dtype. Default: stored."
)
def export(
    run_url: str,
    rollouts: bool,
    model: bool,
    adapter: bool,
    folder: Path,
    iterations: str | None,
    grading: str | None,
    overwrite: bool,
    version: int | None,
    dtype: str | None,
) -> None:
    """Export the model (--model), its LoRA adapter (--adapter) or the responses (--rollouts) of a run."""
    _check_export(
        {"--rollouts": rollouts, "--model": model, "--adapter": adapter},
        {
            "--iterations": iterations,
            "--grading": grading,
            "--overwrite": overwrite or None,
            "--version": version,
            "--dtype": dtype,
        },
    )
    if rollouts:
        chosen = ":" if iterations is None else iterations
        with progress() as progress_line:
            files = export_rollouts(
                connect_to_run(run_url),
                chosen,
                folder,
                grading=grading,
                overwrite=overwrite,
                progress=progress_line.tell,
            )
        for file in files:
            click.echo(f"{file.path}: {file.responses} of {file.planned} responses of iteration {file.iteration}")
    elif model:
        with progress() as progress_line:
            progress_line.tell("reading and writing weights")
            done = export_model(connect_to_run(run_url), folder, SystemClock(), version=version, dtype=dtype or STORED)
        size = f"{done.num_bytes} bytes of {done.dtype} in {done.files} file{'s' * (done.files > 1)}"
        click.echo(f"{done.path}: weight version {done.version}, {done.tensors} tensors, {size}")
    else:
        with progress() as progress_line:
            progress_line.tell("reading and writing the adapter")
            made = export_adapter(connect_to_run(run_url), folder, SystemClock(), version=version)
        layers = f"{made.layers} layer{'s' * (made.layers > 1)}"
        size = f"rank {made.rank}, {layers}, {made.num_bytes} bytes of float32"
        click.echo(f"{made.path}: adapter of weight version {made.version}, {size}")


def _check_export(kinds: Mapping[str, bool], options: Mapping[str, object]) -> None:
    """Raise ValueError unless one kind is chosen, with no options but its own; None in `options` means not given."""
    chosen = [kind for kind, is_chosen in kinds.items() if is_chosen]
    given = {name for name, value in options.items() if value is not None}
    if len(chosen) != 1 or not given <= EXPORTS[chosen[0]].keys():
        forms = [" ".join([kind, *(f"[{option}]" for option in of_it.values())]) for kind, of_it in EXPORTS.items()]
        raise ValueError(f"export: allowed: {', '.join(forms[:-1])}, or {forms[-1]}")
