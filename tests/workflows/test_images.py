"""The two images of a cluster: one list for both ways of building them, and which pool runs in which."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from flytekit import ImageSpec
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.context_manager import FlyteContextManager
from flytekit.image_spec.default_builder import create_docker_context

from benchmarks.image_sizes import packages_of
from resources.pools import ControlPoolConfig, PoolConfig, PoolsConfig, RolloutPoolConfig, overrides
from tests.processes import LIMIT_S
from tests.workflows import test_iteration
from tests.workflows.test_iteration import CONFIG, job, split
from workflows import images
from workflows.images import APT_PACKAGES, ENVIRONMENT, LISTS, identity, image_spec, main
from workflows.version import version

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
OWN, TRAIN = Image("default", "x/control", "1"), Image("train", "x/train", "2")
TWO = SerializationSettings(ImageConfig.create_from(OWN, [TRAIN]), "p", "d", "v")


@pytest.fixture(scope="module")
def dockerfile():
    """The Dockerfile with one line for each instruction."""
    return (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")


def test_the_dockerfile_builds_the_images_of_the_specs(dockerfile):
    [environment] = re.findall(r"^ENV (.*)$", dockerfile, flags=re.MULTILINE)
    assert dict(each.split("=") for each in environment.split()) == ENVIRONMENT
    [default] = re.findall(r"^ARG EXTRAS=(.*)$", dockerfile, flags=re.MULTILINE)
    named = {default, *re.findall(r"--build-arg EXTRAS=(\w+)", dockerfile)}
    assert named == APT_PACKAGES.keys() <= EXTRAS.keys()
    [without, packages] = re.findall(
        r'^RUN \[ "\$\{EXTRAS\}" = (\w+) \] .*--no-install-recommends ([\w -]+?)\s+&&', dockerfile, flags=re.MULTILINE
    )[0]
    assert {without: [], default: packages.split()} == APT_PACKAGES
    assert 'pip install --no-cache-dir -c constraints.txt -e ".[${EXTRAS}]"' in dockerfile
    assert set(LISTS) <= set(re.findall(r"^COPY (.*) /root/$", dockerfile, flags=re.MULTILINE)[0].split())


@pytest.mark.parametrize("name", ["control", "train"])
def test_flytekit_makes_a_dockerfile_of_a_spec(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    spec = ImageSpec(**image_spec(name, "registry.example.org/acme"))
    assert re.fullmatch(rf"registry\.example\.org/acme/gleaner-{name}:[\w-]+", spec.image_name())
    create_docker_context(spec, tmp_path)
    made = (tmp_path / "Dockerfile").read_text()
    assert made.count(f"uv pip install -c /root/constraints.txt -r /root/pyproject.toml --extra {name}\n") == 1
    for file in LISTS:
        assert f"COPY --chown=flytekit {file} /root/" in made
        assert (tmp_path / file).read_bytes() == (ROOT / file).read_bytes()
    for package in APT_PACKAGES["train"]:
        assert (package in made) == (name == "train")
    for variable, value in ENVIRONMENT.items():
        assert f"{variable}={value}" in made


def test_the_image_of_the_control_pool_has_no_torch_and_the_other_has():
    control, absent = packages_of("control")
    assert absent == []
    assert {"flytekit", "transformers", "pyarrow", "flytekitplugins-kfpytorch"} <= control.keys()
    assert not {"torch", "triton", "vllm"} & control.keys()
    assert 0.3e9 < sum(control.values()) < 0.9e9
    train, absent = packages_of("train")
    assert "torch" in train
    assert train.keys() > control.keys()
    assert "vllm" in {*train, *absent}


def inside(settings, pool):
    context = FlyteContextManager.current_context()
    with FlyteContextManager.with_context(context.with_serialization_settings(settings)):
        return overrides(pool).get("container_image")


@pytest.mark.parametrize(
    ("pool", "with_two", "with_one"),
    [
        (PoolConfig(), "x/train:2", None),
        (RolloutPoolConfig(), "x/train:2", None),
        (PoolsConfig(scoring={"teachers": PoolConfig()}).named("teachers"), "x/train:2", None),
        (ControlPoolConfig(), None, None),
        (PoolConfig(image="own/image:3"), "own/image:3", "own/image:3"),
        (ControlPoolConfig(image="own/image:3"), "own/image:3", "own/image:3"),
    ],
)
def test_pools_that_need_torch_run_in_the_image_train_where_one_is_named(pool, with_two, with_one):
    one = SerializationSettings(ImageConfig.create_from(OWN), "p", "d", "v")
    assert (inside(TWO, pool), inside(one, pool), inside(None, pool)) == (with_two, with_one, with_one)


def test_an_execution_starts_each_node_in_its_image(monkeypatch):
    monkeypatch.setattr(test_iteration, "SETTINGS", TWO)
    plan, rollout, train, conclude = split(job(1).nodes)
    assert [each.task_node.overrides.container_image for each in (plan, train, conclude)] == ["", "x/train:2", ""]
    # The pool of the crew names its own.
    assert rollout.array_node.node.task_node.overrides.container_image == "ghcr.io/example/rollout:1"
    pools = {name: pool for name, pool in CONFIG["pools"].items() if name != "rollout"}
    [_, rollout, *_] = split(job(1, {**CONFIG, "pools": pools}).nodes)
    assert rollout.array_node.node.task_node.overrides.container_image == "x/train:2"


@pytest.mark.slow
def test_registration_takes_the_specs_and_names_both_images(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "FOLDER", tmp_path)
    options = CliRunner().invoke(main, ["localhost:1/acme"], catch_exceptions=False).output.split()
    assert options == ["--image", f"{tmp_path}/control.yaml", "--image", f"train={tmp_path}/train.yaml"]
    assert yaml.safe_load((tmp_path / "train.yaml").read_text()) == image_spec("train", "localhost:1/acme")
    pyflyte = [str(Path(sys.executable).parent / "pyflyte"), "--config", "flyte.config", "register", "--dry-run"]
    command = [*pyflyte, "--copy", "none", *options, "--version", "v", "workflows"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
    assert re.search(r"Image\(name='default', fqn='localhost:1/acme/gleaner-control'", printed)
    assert re.search(r"Image\(name='train', fqn='localhost:1/acme/gleaner-train'", printed)
    assert "Task: workflows.training.iterations (Dry run Mode)" in printed


def test_a_version_changes_with_what_a_spec_builds(tmp_path, monkeypatch):
    spec = tmp_path / "control.yaml"
    spec.write_text("a")
    for name in LISTS:
        (tmp_path / name).write_text("b")
    monkeypatch.setattr(images, "ROOT", tmp_path)
    assert identity("x/y:1") == ["x/y:1"]
    found = [version(str(spec)), version(f"{spec},x/y:1"), version("x/y:1")]
    (tmp_path / "constraints.txt").write_text("c")
    found.append(version(str(spec)))
    spec.write_text("d")
    found.append(version(str(spec)))
    assert len(set(found)) == 5
    assert version("x/y:1") == found[2]
