"""The bounds of pyproject.toml against the tested set of versions in constraints.txt."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
# Several extras are not in the tested set as a whole: each says why, there or in docs/guide/first_run.md.
TESTED = (None, "dev")


def bounds() -> list[tuple[str | None, Requirement]]:
    """(extra, requirement); None: of the project itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {None: project["dependencies"], **project["optional-dependencies"]}
    return [(extra, Requirement(line)) for extra, lines in extras.items() for line in lines]


def constrained() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines if not line.startswith("#")]
    assert all(pairs)
    return {canonicalize_name(pair[1]): Version(pair[2]) for pair in pairs if pair}


@pytest.mark.parametrize(("extra", "requirement"), bounds(), ids=str)
def test_every_bound_admits_the_tested_version(extra, requirement):
    version = constrained().get(canonicalize_name(requirement.name))
    if version is None:
        assert extra not in TESTED, f"{requirement.name} is not in constraints.txt"
        return
    assert requirement.specifier.contains(version), f"{requirement} does not admit {version} of constraints.txt"


def test_no_name_has_two_lines_in_the_tested_set():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(constrained())


def test_botocore_is_held_to_what_its_user_asks_for():
    asked = [Requirement(line) for line in requires("aiobotocore") or ()]
    [asked_for] = [each.specifier for each in asked if each.name == "botocore" and each.marker is None]
    held = {each.name: each.specifier for _, each in bounds() if each.name in ("botocore", "boto3")}
    assert held == {"botocore": asked_for, "boto3": asked_for}


def test_pre_commit_runs_the_formatter_and_linter_of_make_check():
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"rev: v(\S+)", text) == [str(constrained()["ruff"])]


def test_the_packages_for_cuda_are_pinned_to_the_cuda_that_the_guide_names():
    pinned = constrained()
    families = [name for name in pinned if name.startswith(("nvidia-", "cuda-"))]
    assert {"cuda-toolkit", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= set(families)
    assert {"triton", "flashinfer-python", "torchvision"} <= pinned.keys()
    toolkit, torch = pinned["cuda-toolkit"], pinned["torch"]
    guide = (ROOT / "docs" / "guide" / "first_run.md").read_text(encoding="utf-8")
    assert f"torch {torch} from PyPI is built for CUDA {toolkit.major}.{toolkit.minor}" in guide
    assert {name[-2:] for name in families if re.search(r"-cu1\d$", name)} <= {str(toolkit.major), "12"}
