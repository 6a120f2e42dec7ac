"""What a process has loaded once it has imported a task: what every container pays before its first line of ours."""

import json
import subprocess
import sys
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

# Not ru_maxrss, which also counts the process that this one was forked from.
LOOK = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print(json.dumps([sorted(sys.modules), int(peak) / 1024]))
"""


def loaded_by(module: str) -> tuple[set[str], float]:
    """The modules of a fresh interpreter that has imported `module`, and its peak memory in MB."""
    command = [sys.executable, "-c", LOOK, module]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, cwd=ROOT)
    names, peak_mb = json.loads(done.stdout.splitlines()[-1])
    return set(names), peak_mb


@pytest.fixture(scope="module")
def flytekit_mb() -> float:
    return loaded_by("flytekit")[1]


@pytest.mark.parametrize("module", [*WORKFLOWS, *TASKS])
def test_what_a_container_imports_is_flytekit_and_little_else(module: str, flytekit_mb: float):
    names, peak_mb = loaded_by(module)
    assert module in names
    assert sorted(names & (MODEL_LIBRARIES | TABLES | OTHERS)) == []
    assert peak_mb <= PEAK_RATIO_MAX * flytekit_mb


def test_what_is_looked_for_would_be_found():
    names, _ = loaded_by("tasks.learning.batching")
    assert "torch" in names
