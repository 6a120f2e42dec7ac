"""VLLM's model runner V2 without a GPU: Triton's interpreter runs its kernels, in tenths of a second a step.

VLLM's CPU build runs V2 only if Triton has a backend for CPUs, and Triton is for GPUs. So a test runs its own file once
more in a child process, in which Triton lies in a folder behind all others, interprets, and has a backend in name.
"""

import os
import subprocess
import sys
from pathlib import Path

# The folder, which `make test-vllm-drafts` fills.
TRITON = os.environ.get("GLEANER_TRITON", "")
WHY_NOT = "GLEANER_TRITON names no folder with Triton: make test-vllm-drafts"
MISSING = not (Path(TRITON) / "triton").is_dir()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# "all" runs the exhaustive tests too, which take most of the time.
WHICH = os.environ.get("GLEANER_INTERPRETED", "")
# Python runs this at its start, also in the processes that vLLM starts. The interpreter needs neither of the two.
_SITE = """
import os, sys
sys.path.append(os.environ["GLEANER_TRITON"])
from triton.backends import Backend, backends
class Driver:
    @staticmethod
    def is_active():
        return True
backends["cpu"] = Backend(compiler=object, driver=Driver)
"""


def run_interpreted(file: str, folder: Path, limit_s: float, *options: str, interpret: bool = True) -> None:
    """Run the file's tests in a child process; AssertionError with the child's output if one fails.

    options: further arguments of pytest. interpret: False leaves Triton its compiler.
    """
    (folder / "sitecustomize.py").write_text(_SITE)
    root = Path(__file__).parents[1]
    paths = [str(folder), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "GLEANER_TRITON": str(Path(TRITON).resolve()),
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_INTERPRET": str(int(interpret)),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    options = (*options, *(() if WHICH == "all" else ("-m", "not exhaustive")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--disable-warnings", *options, file]
    child = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=limit_s
    )
    assert child.returncode == 0, child.stdout[-10_000:] + child.stderr[-2_000:]
