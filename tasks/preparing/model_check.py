"""Whether engine and trainer can use the model of a run, asked at the start and without importing torch here.

`model_trial` answers with torch: in this process if torch is imported already, else in a process that ends with the
answer. Where torch is not installed, config.json and headers alone are looked at.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from storage.records.canonical import encode
from tasks.configuration.run_config import RunConfig
from tasks.learning.pretrained import ModelError
from tasks.preparing.model_kind import beyond_embeddings, check_kind
from tasks.preparing.model_use import ModelUse, use_of

TIME_LIMIT_S = 600.0
_PROJECT_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = "tasks.preparing.model_trial"
# The trial uses no GPU of this machine, and downloads nothing.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
_WITHOUT_TORCH = (
    "whether engine and trainer can use the model, because torch is not installed here: only its config.json and the "
    "headers of its weights were looked at"
)


@dataclass(frozen=True)
class ModelFindings:
    """The findings of the model check.

    Attributes:
        looked_at: A line about the look: directory, trainer and engine, seconds.
        doubts: A line for each doubt.
    """

    looked_at: str
    doubts: tuple[str, ...]


def check_model_use(config: RunConfig, model_dir: Path, use: ModelUse | None = None) -> ModelFindings:
    """Try the model; raises ModelError for a model that trainer or engine would refuse, EngineError as `use_of`.

    use: None for the use that the run makes of its policy.
    """
    began_s = time.monotonic()
    check_kind(model_dir)
    use = use_of(config, model_dir) if use is None else use
    if "torch" in sys.modules:
        doubts = _tried_here(use, model_dir, _state(model_dir))
    elif find_spec("torch") is not None:
        doubts = _tried_apart(use, model_dir)
    else:
        doubts = (_WITHOUT_TORCH,)
    beyond = beyond_embeddings(model_dir)
    doubts += () if beyond is None else (beyond,)
    return ModelFindings(f"{model_dir} in trainer and engine, in {time.monotonic() - began_s:.1f} s", doubts)


@functools.lru_cache(maxsize=64)
def _tried_here(use: ModelUse, model_dir: Path, _files: tuple[tuple[str, int, int], ...]) -> tuple[str, ...]:
    """The doubts, in this process, once for each use of unchanged files; raises ModelError."""
    from tasks.preparing.model_trial import try_model  # noqa: PLC0415 - it imports torch

    return tuple(try_model(use, model_dir))


def _state(model_dir: Path) -> tuple[tuple[str, int, int], ...]:
    """The identity of a directory's files: names, sizes, and modification times."""
    files = [(file.name, file.stat()) for file in sorted(model_dir.iterdir())]
    return tuple((name, found.st_size, found.st_mtime_ns) for name, found in files)


def _tried_apart(use: ModelUse, model_dir: Path) -> tuple[str, ...]:
    """The doubts, by a separate process; raises ModelError, also if the process dies of the model or runs too long."""
    paths = dict.fromkeys([*(path or str(Path.cwd()) for path in sys.path), str(_PROJECT_ROOT)])
    with subprocess.Popen(  # noqa: S603 - this interpreter and a module of ours
        [sys.executable, "-P", "-m", _PROGRAM, str(model_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
    ) as program:
        try:
            told, errors = program.communicate(encode(use), timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ModelError(
                f"policy.path: building the model of {model_dir} without weights takes longer than {TIME_LIMIT_S:g} s"
            ) from None
        finally:
            program.kill()
    lines = told.decode(errors="replace").splitlines()
    how = f"ended with {_ending(program.returncode)}{_last_line(errors)}"
    if not lines:
        # The process ended while importing torch, which says nothing about the model.
        return (f"whether trainer and engine can use the model: the process that tries it {how}",)
    if program.returncode or len(lines) < 2:  # not ready, or no reply
        raise ModelError(f"policy.path: the process that tries the model of {model_dir} without its weights {how}")
    reply: dict[str, Any] = json.loads(lines[-1])
    if "refusal" in reply:
        raise ModelError(reply["refusal"])
    return tuple(reply["doubts"])


def _ending(code: int) -> str:
    if code >= 0:
        return f"status {code}"
    name = signal.Signals(-code).name
    return f"{name}, perhaps for want of memory" if name == "SIGKILL" else name


def _last_line(errors: bytes) -> str:
    lines = errors.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:200]}" if last else ""
