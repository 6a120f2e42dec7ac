"""The training workflow as a user runs it on one machine: `pyflyte run`, in a process that is watched."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from tasks.preparing.local_training import END_TIME_LIMIT_S, ROOT, workflow_command

_POLL_INTERVAL_S = 0.02


def show_command(console: Console, config: Path, iterations: int) -> None:
    """Print the command as it is typed in the project's folder."""
    console.print("$ " + " ".join(["pyflyte", *workflow_command(config, iterations)[1:]]).replace(f"{ROOT}/", ""))


def run_workflow(
    config: Path, iterations: int, log: Path, watch: Callable[[], None], environment: Mapping[str, str] | None = None
) -> None:
    """Run the workflow and call `watch` again and again; exits with the end of the log if the workflow fails.

    environment: variables of the workflow's processes besides this one's.
    """
    with log.open("wb") as output:
        child = subprocess.Popen(
            workflow_command(config, iterations),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )
        try:
            while child.poll() is None:
                watch()
                time.sleep(_POLL_INTERVAL_S)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait(END_TIME_LIMIT_S)
    exit_if_failed(child.returncode, log)


def exit_if_failed(status: int, log: Path) -> None:
    """Exit with the end of the log unless the workflow's process ended with status 0."""
    if status:
        text = log.read_text(errors="replace")[-4000:]
        sys.exit(f"{text}\nthe workflow failed with exit code {status}; its log is {log}")
