"""The command `gleaner doctor`: what this machine has, what of it is wrong, and self-tests of its kernels."""

import sys

import click

from storage.fitness import Finding


@click.command(short_help="Examine this machine: GPUs, driver, memory, kernels.")
@click.option("--gpus", type=click.IntRange(min=0), help="How many GPUs it should have. Default: as many as it has.")
def doctor(gpus: int | None) -> None:
    """Examine this machine, with or without a GPU, in less than a minute; exits with 1 where something is wrong."""
    from tasks.doctor.examination import examine  # noqa: PLC0415 - it imports torch: seconds

    wrong = 0
    for finding in examine(gpus):
        click.echo(line_of(finding))
        wrong += finding.lack is not None
    click.echo(f"wrong: {wrong} of these" if wrong else "nothing is wrong")
    sys.exit(int(wrong > 0))


def line_of(finding: Finding) -> str:
    """A finding in one line."""
    return f"{finding.name}: {finding.shown}" if finding.lack is None else f"{finding.name}: WRONG: {finding.lack}"
