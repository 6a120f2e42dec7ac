"""The version to register under: a digest of the image, this checkout's code, and what the launch plans fix.

Flyte keeps what a version was first registered with. To register other things under it again changes nothing, and gives
no error.

    python -m workflows.version registry.example.org/gleaner:1
"""

import hashlib
import json
import os
from dataclasses import asdict

import click

from resources.package_code import ROOT, code_digest
from tasks.configuration.run_config import settings_digest
from tasks.configuration.schedules import scheduled_runs
from workflows.launch_plans import EXAMPLE

_DIGITS = 12


def version(image: str) -> str:
    """12 hexadecimal digits: equal for equal registered contents, different after any change of them."""
    runs = scheduled_runs(os.environ, EXAMPLE)
    plans = {name: [settings_digest(settings), asdict(run)] for name, (run, settings) in runs.items()}
    contents = json.dumps([image, code_digest(ROOT), plans], sort_keys=True)
    return hashlib.sha256(contents.encode()).hexdigest()[:_DIGITS]


@click.command()
@click.argument("image", required=False)
@click.option("--code", is_flag=True, help="Print the digest of the code alone instead, as tasks compare it.")
def main(image: str | None, code: bool) -> None:
    """Print the version under which to register with IMAGE what the environment names."""
    if code == (image is not None):
        raise click.UsageError("allowed: IMAGE, or --code")
    click.echo(code_digest(ROOT) if image is None else version(image))


if __name__ == "__main__":
    main()
