"""The version to register under: a digest of the images, this checkout's code, and what the launch plans fix.

Flyte keeps what a version was first registered with. To register other things under it again changes nothing, and gives
no error.

    python -m workflows.version registry.example.org/gleaner-control:1,registry.example.org/gleaner-train:1 my_plans.py
"""

import hashlib
import json
import os
import runpy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from flytekit import LaunchPlan
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.tools.translator import get_serializable

from resources.package_code import ROOT, code_digest
from tasks.configuration.run_config import settings_digest
from tasks.configuration.schedules import environment_runs
from workflows.images import identity

_DIGITS = 12


def version(image: str, files: Sequence[Path] = ()) -> str:
    """12 hexadecimal digits: equal for equal registered contents, different after any change of them.

    Args:
        image: the name of an image or the file of its spec; of several, with commas between
        files: the Python files that make launch plans and are registered, too
    """
    runs = environment_runs(os.environ)
    plans = {name: [settings_digest(settings), asdict(run)] for name, (run, settings) in runs.items()}
    images = [identity(each) for each in image.split(",")]
    contents = json.dumps([images, code_digest(ROOT), plans, *map(_plans_of, files)], sort_keys=True)
    return hashlib.sha256(contents.encode()).hexdigest()[:_DIGITS]


def _plans_of(file: Path) -> dict[str, str]:
    """A digest of each launch plan that running a file makes, by name."""
    before = dict(LaunchPlan.CACHE)
    runpy.run_path(str(file))
    settings = SerializationSettings(ImageConfig.auto(img_name="image:1"), "project", "domain", "version")
    made = {name: plan for name, plan in LaunchPlan.CACHE.items() if name not in before}
    specs = {name: get_serializable(OrderedDict(), settings, plan).to_flyte_idl().spec for name, plan in made.items()}
    return {
        name: hashlib.sha256(spec.SerializeToString(deterministic=True)).hexdigest() for name, spec in specs.items()
    }


@click.command()
@click.argument("image", required=False)
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--code", is_flag=True, help="Print the digest of the code alone instead, as tasks compare it.")
def main(image: str | None, files: tuple[Path, ...], code: bool) -> None:
    """Print the version under which to register with IMAGE the workflows, and the launch plans of FILES."""
    if code == (image is not None):
        raise click.UsageError("allowed: IMAGE [FILES], or --code")
    click.echo(code_digest(ROOT) if image is None else version(image, files))


if __name__ == "__main__":
    main()
