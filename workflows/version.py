"""The version to register under: a digest of the image, this checkout's code, and what the launch plans fix.

Flyte keeps what a version was first registered with. To register other things under it again changes nothing, and gives
no error.

    python -m workflows.version registry.example.org/gleaner:1
"""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from tasks.configuration.run_config import settings_digest
from tasks.configuration.schedules import scheduled_runs
from workflows.launch_plans import EXAMPLE

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("storage", "resources", "tasks", "workflows")
_DIGITS = 12


def version(image: str) -> str:
    """12 hexadecimal digits: equal for equal registered contents, different after any change of them."""
    files = sorted(path for package in _PACKAGES for path in (ROOT / package).rglob("*.py"))
    code = {path.relative_to(ROOT).as_posix(): _digest(path.read_bytes()) for path in files}
    runs = scheduled_runs(os.environ, EXAMPLE)
    plans = {name: [settings_digest(settings), asdict(run)] for name, (run, settings) in runs.items()}
    return _digest(json.dumps([image, code, plans], sort_keys=True).encode())[:_DIGITS]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@click.command()
@click.argument("image")
def main(image: str) -> None:
    """Print the version under which to register with IMAGE what the environment names."""
    click.echo(version(image))


if __name__ == "__main__":
    main()
