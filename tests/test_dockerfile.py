"""What the image installs its dependencies with: before the code is copied, every listed package needs a directory."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_listed_package_has_a_directory_when_the_dependencies_are_installed(tmp_path):
    before = (ROOT / "Dockerfile").read_text(encoding="utf-8").partition("RUN pip install")[0]
    [copied] = re.findall(r"^COPY (.*) /root/$", before, flags=re.MULTILINE)
    for name in copied.split():
        shutil.copyfile(ROOT / name, tmp_path / name)
    [program] = re.findall(r'^RUN python -c "(.*?)"$', before.replace("\\\n", ""), flags=re.MULTILINE)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=600)
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "storage.weights" in listed["packages"]
    for package in listed["packages"]:
        assert (tmp_path / package.replace(".", "/")).is_dir(), package
    for module in listed["py-modules"]:
        assert (tmp_path / f"{module}.py").is_file(), module
