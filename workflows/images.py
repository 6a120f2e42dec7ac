"""The two images of a cluster, as ImageSpecs that `pyflyte register` builds; the Dockerfile builds the same.

An image contains the extra of the same name in pyproject.toml, in the versions of constraints.txt. `resources.pools`
says which image the pods of a pool run in. The code is in neither image: `pyflyte register` uploads it.

    python -m workflows.images registry.example.org/acme
"""

import json
from pathlib import Path
from typing import Any

import click

from resources.package_code import ROOT

# Triton, by which vLLM and our sampling run on a GPU, compiles its launchers with gcc.
APT_PACKAGES: dict[str, list[str]] = {"control": [], "train": ["gcc", "libc6-dev"]}
ENVIRONMENT = {
    "PYTHONPATH": "/root",
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    # Without torch transformers advises to install it, wherever a tokenizer is all that is wanted.
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
LISTS = ("pyproject.toml", "constraints.txt")
FOLDER = Path("build/images")


def image_spec(name: str, registry: str) -> dict[str, Any]:
    """The fields of flytekit's ImageSpec of an image; its builder works in the checkout's root.

    Args:
        name: control or train
        registry: where the image is pushed, as registry.example.org/acme
    """
    return {
        "name": f"gleaner-{name}",
        "registry": registry,
        "python_version": "3.11",
        "apt_packages": APT_PACKAGES[name],
        "env": ENVIRONMENT,
        "copy": list(LISTS),
        # Nothing is built of this project: its code is uploaded.
        "commands": [f"uv pip install -c /root/{LISTS[1]} -r /root/{LISTS[0]} --extra {name}"],
    }


def identity(image: str) -> list[str]:
    """What tells an image from others: its name, or if `image` is the file of a spec, what the image is made from."""
    if not Path(image).is_file():
        return [image]
    return [Path(image).read_text(encoding="utf-8"), *((ROOT / name).read_text(encoding="utf-8") for name in LISTS)]


@click.command()
@click.argument("registry")
def main(registry: str) -> None:
    """Write the specs of both images for REGISTRY to build/images; prints the options of `pyflyte register`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in APT_PACKAGES:
        # JSON is YAML, too.
        (FOLDER / f"{name}.yaml").write_text(json.dumps(image_spec(name, registry), indent=2), encoding="utf-8")
    click.echo(f"--image {FOLDER}/control.yaml --image train={FOLDER}/train.yaml")


if __name__ == "__main__":
    main()
