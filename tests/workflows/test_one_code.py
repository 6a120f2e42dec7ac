"""One version of the code in an execution: uploads are whole, and a pod with other code does nothing."""

import functools
import json
import os
import subprocess
import sys
import tarfile
from collections import OrderedDict
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.constants import CopyFileDetection
from flytekit.tools.fast_registration import FastPackageOptions, fast_package
from flytekit.tools.translator import get_serializable

from resources.package_code import ROOT, code_digest, code_files
from storage.records import layout
from storage.records.run import exists
from storage.stores.connect import connect
from tasks.configuration.references import PlanReference
from tasks.configuration.run_config import dump, parse
from tasks.local_map import crew_map
from tasks.plan import plan
from tasks.rollout import rollout
from tests.processes import LIMIT_S, container_of
from tests.small_run import document, model_directory
from workflows import uploads
from workflows.evaluation import evaluation
from workflows.iteration import iteration
from workflows.regrading import regrading
from workflows.training import iterations, training

SETTINGS = SerializationSettings(ImageConfig.auto(img_name="x/y:1"), "p", "d", "v")
OTHER = "0123456789ab"
UPLOADED = """
import sys, tarfile
from flytekit.constants import CopyFileDetection
from flytekit.tools.fast_registration import FastPackageOptions, fast_package
import workflows.training
style = FastPackageOptions([], copy_style=CopyFileDetection.LOADED_MODULES)
print(*tarfile.open(fast_package(sys.argv[1], sys.argv[2], options=style)).getnames(), sep="\\n")
"""


# `pyflyte register --copy auto` in a folder of the user's, up to the upload, of which the names are printed.
REGISTERED = """
import os, sys, tarfile
from flytekit.clis.sdk_in_container.pyflyte import main
from flytekit.remote.remote import FlyteRemote

def upload_file(remote, to_upload, *arguments, **settings):
    print("uploaded", *tarfile.open(to_upload).getnames(), sep="\\n", flush=True)
    os._exit(0)

FlyteRemote.upload_file = upload_file
main(["register", "--copy", "auto", "--image", "x/y:1", "--version", "v", *sys.argv[1:]])
"""
PLANS = """
from workflows.launch_plans import scheduled
scheduled("run.yaml", "@daily", name="nightly")
"""


def registered(folder, *arguments):
    """The files that registration uploads from a folder."""
    command = [sys.executable, "-c", REGISTERED, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, check=False, timeout=LIMIT_S, env=environment
    )
    assert done.returncode == 0, done.stderr
    return {name for name in done.stdout.partition("uploaded\n")[2].splitlines() if name.endswith(".py")}


@pytest.fixture
def project(tmp_path):
    """A folder of a user's beside the checkout: launch plans, a configuration, rewards, and a module for nothing."""
    folder = tmp_path / "project"
    (folder / "scoring").mkdir(parents=True)
    rewards = [{"function": "my_reward:f"}]
    (folder / "run.yaml").write_text(json.dumps(document("memory://r", tmp_path, rewards=rewards)))
    for name, text in {
        "my_plans.py": PLANS,
        "my_reward.py": "from scoring.table import f\n",
        "scoring/__init__.py": "",
        "scoring/table.py": "def f(completions): ...\n",
        "other_reward.py": "def f(completions): ...\n",
    }.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
def test_registration_uploads_the_rewards_of_the_users_folder_that_its_launch_plans_name(project):
    rewards = {"my_reward.py", "scoring/__init__.py", "scoring/table.py"}
    assert registered(project, "my_plans.py") == {"my_plans.py", *rewards}
    # Modules for configurations that come later are named beside.
    assert registered(project, "my_plans.py", "other_reward.py") == {"my_plans.py", "other_reward.py", *rewards}


@pytest.mark.slow
def test_registration_from_the_checkout_uploads_the_whole_package():
    assert registered(ROOT, "workflows") == {
        path.relative_to(ROOT).as_posix() for path in code_files() if path.suffix == ".py"
    }


@pytest.mark.slow
def test_what_flytekit_uploads_of_loaded_modules_is_the_whole_package(tmp_path):
    command = [sys.executable, "-c", UPLOADED, str(ROOT), str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=LIMIT_S).stdout
    names = {name for name in printed.splitlines() if name.endswith((".py", ".html", ".css", ".js"))}
    assert names == {path.relative_to(ROOT).as_posix() for path in code_files()}
    assert {"tasks/learning/train_iteration.py", "tasks/viewing/page.js"} <= names


@pytest.fixture
def uploaded(tmp_path, monkeypatch):
    """uploaded(config) -> files of the user's that go along from a folder with rewards and what surrounds them."""
    monkeypatch.setattr(uploads, "_own_modules", set())
    files = {
        "my_reward.py": "import numpy\nfrom scoring import table\nimport tasks.train\ndef f(completions): ...\n",
        "scoring/__init__.py": "from . import rules\n",
        "scoring/table.py": "import my_reward\nfrom ..not_there import x\n",
        "scoring/rules.py": "",
        "scoring/unused.py": "",
        "own/deep/world.py": "class World: ...\n",
        "own/deep/broken.py": "def (\n",
        "tasks/train.py": "",
        "notes.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def of(**sections):
        uploads.take_along(parse(document("memory://r", tmp_path, **sections)))
        found = uploads._uploaded_files(str(tmp_path), [])
        style = FastPackageOptions([], copy_style=CopyFileDetection.LOADED_MODULES)
        with tarfile.open(fast_package(tmp_path, tmp_path, options=style)) as tar:
            assert tar.getnames() == sorted(Path(each).relative_to(tmp_path).as_posix() for each in found)
            return set(tar.getnames())

    return of


def test_modules_that_a_configuration_names_go_along_with_what_they_import(uploaded):
    found = uploaded(rewards=[{"function": "my_reward:f"}])
    assert found == {"my_reward.py", "scoring/__init__.py", "scoring/table.py", "scoring/rules.py"}


def test_environments_and_losses_go_along_and_built_in_names_and_broken_modules_do_no_harm(uploaded):
    found = uploaded(
        rewards=[{"function": "arithmetic"}, {"function": "not_there:f"}],
        turns={"environment": "own.deep.world:World"},
        algorithm={"policy_loss": "own.deep.broken:loss"},
    )
    assert found == {"own/deep/world.py", "own/deep/broken.py"}


def bound(entity, name):
    """The text that the first node of a registered workflow gets as an input."""
    [node, *_] = get_serializable(OrderedDict(), SETTINGS, entity).template.to_flyte_idl().nodes
    [value] = [each.binding.scalar.primitive.string_value for each in node.inputs if each.var == name]
    return value


@pytest.mark.parametrize("entity", [training, evaluation, iteration, regrading], ids=lambda entity: entity.name)
def test_a_workflow_is_registered_with_the_digest_of_its_code(entity):
    assert bound(entity, "code") == code_digest()


def error_of(task, folder, **inputs):
    """The line with which Flyte's error of a container begins."""
    with container_of(task, inputs, folder, str(folder), BATCH_JOB_ARRAY_INDEX_VAR_NAME="I", I="0") as process:
        process.wait(LIMIT_S)
    read = errors_pb2.ErrorDocument()
    read.ParseFromString((folder / "out" / "error.pb").read_bytes())
    lines = [line.strip() for line in read.error.message.splitlines() if line.strip()]
    return lines[1].removeprefix("tasks.task_log.TaskFailed: ")


@pytest.mark.slow
def test_a_pod_with_other_code_is_refused_in_one_line_that_names_both(tmp_path):
    url = str(tmp_path / "run")
    config = dump(parse(document(url, model_directory(tmp_path / "model"))))
    said = f"OtherCode: code {code_digest()} in this pod; allowed: {OTHER}, with which the execution was registered."
    reference = PlanReference(run_url=url, iteration=0, weight_version=0, execution="e", code=OTHER)
    crew = crew_map(functools.partial(rollout, plan=reference))
    # A configuration that other code cannot read is no matter then.
    unknown = config | {"section_of_later_code": {}}
    for place, line in (
        ("iterations", error_of(iterations, tmp_path / "1", config=unknown, count=1, code=OTHER)),
        ("plan", error_of(plan, tmp_path / "2", config=unknown, after=-1, pools=["rollout"], code=OTHER)),
        (f"run {url}, iteration 0, slot 0", error_of(crew, tmp_path / "3", slot=[0], plan=reference)),
    ):
        assert line.startswith(f"{place}: {said}")
        assert line.endswith("Nothing was done yet")
    assert not exists(connect(url), layout.plan(0))


@pytest.mark.slow
def test_every_reference_of_a_plan_knows_the_digest(tmp_path):
    """Locally nothing is compared: an edit while a run goes on does not stop it."""
    evaluates = {"evaluation": {"data": document("", tmp_path)["data"], "interval": 1}}
    config = dump(parse(document(str(tmp_path / "run"), model_directory(tmp_path / "model"), **evaluates)))
    reference, _, trains, evaluated, _, [due] = plan(
        config=config, after=-1, pools=["rollout"], evaluates=True, code=OTHER
    )
    assert [each.code for each in (reference, trains, evaluated, due)] == [OTHER] * 4
