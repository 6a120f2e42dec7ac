"""Training on this machine from Python: the command as in a shell, in a process that is followed to its end.

In a separate process, so a notebook holds neither the model nor Flyte's state, and survives a crash.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from storage.errors import GleanerError
from tasks.configuration.run_config import load, parse
from tasks.preparing.checks import check_settings

ROOT = Path(__file__).resolve().parents[2]
END_TIME_LIMIT_S = 60.0


class TrainingFailed(GleanerError, RuntimeError):  # noqa: N818 - reads as what happened
    """The workflow's process ended with an error; the output tells the reason."""


def train(config: Path | str | Mapping[str, Any], count: int = 1) -> None:
    """Train `count` more iterations of a run on this machine, and print the output of the workflow.

    config: a YAML or JSON file, or an equivalent mapping, with paths relative to the working directory. Raises
    ValueError (ConfigError) and LookupError for a configuration refused at the start, and TrainingFailed.
    """
    if count < 1:
        raise ValueError(f"count: value {count}; allowed: 1 or more")
    check_settings(parse(config) if isinstance(config, Mapping) else load(config))
    with _as_file(config) as file:
        status = _follow(workflow_command(file, count))
    if status:
        raise TrainingFailed(f"training ended with exit status {status}; the reason is in what it printed")


def workflow_command(config: Path, iterations: int) -> list[str]:
    """The command that trains `iterations` iterations."""
    return [
        str(Path(sys.executable).parent / "pyflyte"),
        *("--config", str(ROOT / "flyte.config"), "run", str(ROOT / "workflows" / "training.py"), "training"),
        *("--config", str(config), "--count", str(iterations)),
    ]


@contextmanager
def _as_file(config: Path | str | Mapping[str, Any]) -> Iterator[Path]:
    """The configuration as a file that the command can read."""
    if not isinstance(config, Mapping):
        yield Path(config)
        return
    with TemporaryDirectory(prefix="gleaner-train-") as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(dict(config)), encoding="utf-8")
        yield file


def _follow(command: list[str]) -> int:
    """Run the command, copy its lines to our standard output (shown by a notebook), and return the exit status."""
    with subprocess.Popen(  # noqa: S603 - our own command
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        try:
            for line in child.stdout or ():
                sys.stdout.write(line)
            return child.wait()
        finally:
            if child.poll() is None:
                # Otherwise the run would go on behind the notebook's back, and hold the lease.
                child.terminate()
                try:
                    child.wait(END_TIME_LIMIT_S)
                except subprocess.TimeoutExpired:
                    child.kill()
