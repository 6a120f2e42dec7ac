"""A version is the same for what is the same, and another one for everything that Flyte would not register again."""

import re

import pytest
import yaml
from click.testing import CliRunner
from flytekit import LaunchPlan

from tests.test_docs import DOCUMENTS
from tests.workflows.test_launch_plans import EXAMPLES
from workflows import version as versions
from workflows.version import main, version

IMAGE = "registry.example.org/gleaner:1"


@pytest.fixture
def given(tmp_path, monkeypatch):
    """given(run=..., plan=...) -> the version of a schedule file with these changes."""

    def version_of(run=None, **plan):
        document = yaml.safe_load((EXAMPLES / "demo.yaml").read_text(encoding="utf-8"))
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(document | (run or {})))
        described = {"config": "run.yaml", "schedule": "0 2 * * *"} | plan
        (tmp_path / "schedules.yaml").write_text(yaml.safe_dump({"math": described}))
        monkeypatch.setenv("GLEANER_SCHEDULES", str(tmp_path / "schedules.yaml"))
        return version(IMAGE)

    return version_of


def test_it_changes_with_everything_that_a_plan_fixes(given):
    notify = [{"email": ["team@example.org"]}]
    found = [
        given(),
        given(run={"pools": {"rollout": {"count": 3}}}),
        given(schedule="0 3 * * *"),
        given(iterations=8),
        given(notify=notify),
    ]
    assert len(set(found)) == len(found)
    assert given() == found[0]


def test_it_changes_with_the_image_and_the_code(given, tmp_path, monkeypatch):
    before = given()
    assert version("registry.example.org/gleaner:2") != before
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    found = [before, given()]
    for package in ("storage", "resources", "tasks", "workflows"):
        (tmp_path / package / "inner").mkdir(parents=True)
        for content in ("A = 1", "A = 2"):
            (tmp_path / package / "inner/part.py").write_text(content)
            found.append(given())
    assert len(set(found)) == len(found) == 10


def test_it_changes_with_each_launch_plan_of_a_file(tmp_path):
    file, found = tmp_path / "plans.py", [version(IMAGE)]
    before = dict(LaunchPlan.CACHE)
    for arguments in ("", ", iterations=5", ", overrides=['run.seed=9']", ", name='another'", ""):
        file.write_text(
            f"from workflows.launch_plans import scheduled\nscheduled({str(EXAMPLES / 'demo.yaml')!r}{arguments})"
        )
        found.append(version(IMAGE, [file]))
        for name in LaunchPlan.CACHE.keys() - before.keys():
            del LaunchPlan.CACHE[name]
    assert found[1] == found[-1]
    assert len(set(found)) == 5


def test_it_is_a_version_that_flyte_takes(given):
    expected = given()
    result = CliRunner().invoke(main, [IMAGE])
    assert (result.exit_code, result.output) == (0, f"{expected}\n")
    assert len(expected) == 12
    assert int(expected, 16)


def test_the_guides_command_registers_under_the_version_of_what_it_registers():
    """Under a version that is written out, a second registration with other settings would change nothing."""
    texts = [document.read_text(encoding="utf-8").replace("\\\n", " ") for document in DOCUMENTS]
    commands = [
        line for text in texts for line in text.splitlines() if re.match(r"[\w./]*pyflyte\b.* register\b", line)
    ]
    assert commands
    for command in commands:
        image = ",".join(re.findall(r"--image (?:\w+=)?(\S+)", command))
        assert image
        assert re.search(
            rf'--version "\$\(\S+ -m workflows\.version {re.escape(image)}((?: \S+)*)\)" workflows\1$', command
        ), command
