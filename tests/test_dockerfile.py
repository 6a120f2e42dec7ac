"""How the project is installed: the image's dependencies before its code is copied, and never as a wheel."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A front end such as pip calls a backend so, in the project's folder.
HOOK = "import sys; sys.path.insert(0, 'build_backend'); import editable_only; editable_only.{}(sys.argv[1])"


def call(hook: str, project: Path, target: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", HOOK.format(hook), str(target)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_the_image_installs_its_dependencies_from_what_it_copies_before_the_code(tmp_path):
    before = (ROOT / "Dockerfile").read_text(encoding="utf-8").partition("RUN pip install")[0]
    project = tmp_path / "root"
    for names, folder in re.findall(r"^COPY (.*) /root/(\S*)$", before, flags=re.MULTILINE):
        for name in names.split():
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, project / folder)
            else:
                (project / folder).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, project / folder / Path(name).name)
    [program] = re.findall(r'^RUN python -c "(.*?)"$', before.replace("\\\n", ""), flags=re.MULTILINE)
    subprocess.run([sys.executable, "-c", program], cwd=project, check=True, timeout=600)
    (tmp_path / "wheels").mkdir()
    done = call("build_editable", project, tmp_path / "wheels")
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "wheels").iterdir()
    assert ".editable-" in wheel.name
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "storage.weights" in listed["packages"]
    for package in listed["packages"]:
        assert (project / package.replace(".", "/")).is_dir(), package


@pytest.mark.parametrize("hook", ["build_wheel", "build_sdist"])
def test_a_wheel_is_refused_in_one_line(tmp_path, hook):
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    assert (build["build-backend"], build["backend-path"]) == ("editable_only", ["build_backend"])
    done = call(hook, ROOT, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.endswith("there is no wheel of it; allowed: pip install -e .")
    assert list(tmp_path.iterdir()) == []
