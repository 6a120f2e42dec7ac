"""What a process has loaded once it has imported a task: what every container pays before its first line of ours."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted(f"workflows.{file.stem}" for file in (ROOT / "workflows").glob("*.py") if file.stem != "__init__")
TASKS = [f"tasks.{name}" for name in ("plan", "rollout", "train", "conclude", "evaluate", "forecast", "local_map")]
MODEL_LIBRARIES = {"torch", "transformers", "vllm", "triton", "datasets"}
TABLES = {"numpy.linalg", "pyarrow.lib"}
# Of a package that flytekit loads lazily, what is there only when it was really imported.
OTHERS = {"kubernetes.client", "pandas.core"}
# Times flytekit's own peak, which is 85 MB, or more where the kernel maps files in larger pieces. Measured: 1.09; with
# NumPy and Arrow it was 1.6, with torch it would be 4.
PEAK_RATIO_MAX = 1.3

# One interpreter imports all, one after another: what is absent at the end was loaded by none, and a peak only grows.
# Not ru_maxrss, which also counts the process that this one was forked from.
LOOK = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    [peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    print(json.dumps([name, sorted(sys.modules), int(peak) / 1024]))
"""


def loaded_by(*modules: str) -> Iterator[tuple[str, set[str], float]]:
    """(module, all modules, peak memory in MB) of a fresh interpreter, after each of its imports in this order."""
    command = [sys.executable, "-c", LOOK, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, cwd=ROOT)
    for line in done.stdout.splitlines():
        module, names, peak_mb = json.loads(line)
        yield module, set(names), peak_mb


def test_what_containers_import_is_flytekit_and_little_else():
    (_, _, flytekit_mb), *looks = loaded_by("flytekit", *WORKFLOWS, *TASKS)
    assert [module for module, _, _ in looks] == [*WORKFLOWS, *TASKS]
    for module, names, peak_mb in looks:
        assert module in names
        assert sorted(names & (MODEL_LIBRARIES | TABLES | OTHERS)) == [], module
        assert peak_mb <= PEAK_RATIO_MAX * flytekit_mb, module


def test_what_is_looked_for_would_be_found():
    [(_, names, _)] = loaded_by("tasks.learning.batching")
    assert "torch" in names
