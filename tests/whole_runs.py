"""Whole runs as a user makes them: `pyflyte run`, real processes of slots, and a directory or a bucket as the store.

A process of `pyflyte` imports torch, and starts another that does. Where it is not itself the subject, the same command
runs in the tests' process, and every such run forks its slots from one starter.
"""

import io
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.run import next_iteration
from storage.stores.store import ObjectMissing, ObjectStore

ROOT = Path(__file__).parents[1]
# Many times what a run takes on an idle machine.
LIMIT_S = 1500
# A member that decodes few responses at a time takes so long that it can be killed in the middle.
KILLABLE: dict[str, dict[str, Any]] = {
    "rollout": {"max_responses_in_flight": 8},
    "sampling": {"max_completion_length": 80},
}
# A second slot adds nothing where none is killed.
ONE_SLOT: dict[str, Any] = {"rollout": {"count": 1, "interruptible": True}}


def config_file(folder: Path, model: Path, url: str, **sections: dict[str, Any]) -> Path:
    """A configuration of 2 slots of our own engine and 32 responses; `sections` extend or replace fields of it."""
    document: dict[str, Any] = {
        "run": {"url": url, "seed": 3, "num_prompts_per_step": 8, "num_generations": 4},
        "policy": {"path": str(model)},
        "data": {"source": "arithmetic", "limit": 20},
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": 40},
        "rollout": {
            "engine": "torch",
            "context_length": 240,
            "max_responses_in_flight": 16,
            "flush_interval_s": 0.1,
        },
        "optimizer": {"learning_rate": 1e-4},
        "trainer": {"group_timeout_s": 3600},
        "pools": {"rollout": {"count": 2, "interruptible": True}},
    }
    for name, values in sections.items():
        document[name] = document.get(name, {}) | values if isinstance(values, dict) else values
    folder.mkdir(exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def workflow_command(workflow: str, *arguments: str, remote: bool = False) -> list[str]:
    """The arguments of `pyflyte` that run one of our workflows."""
    return [
        "--config",
        str(ROOT / "flyte.config"),
        "run",
        *(["--remote"] if remote else []),
        str(ROOT / "workflows" / f"{workflow}.py"),
        workflow,
        *arguments,
    ]


def pyflyte(workflow: str, *arguments: str) -> "subprocess.Popen[str]":
    """A process of `pyflyte run` of one of our workflows."""
    command = [str(Path(sys.executable).parent / "pyflyte"), *workflow_command(workflow, *arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def ended(child: "subprocess.Popen[str]", *, code: int = 0) -> str:
    """What a process with this exit status has printed, without the lines of Flyte's boxes."""
    output, _ = child.communicate(timeout=LIMIT_S)
    assert child.returncode == code, output
    return _without_boxes(output)


def run_here(workflow: str, *arguments: str, remote: bool = False, code: int = 0) -> str:
    """What `pyflyte run` of one of our workflows prints and logs, in this process; it must give this exit status."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of flytekit, which its command line hides, too
            from flytekit.clis.sdk_in_container.pyflyte import main  # noqa: PLC0415 - this import gives warnings

            result = CliRunner().invoke(main, workflow_command(workflow, *arguments, remote=remote))
    finally:
        logging.getLogger().removeHandler(handler)
    output = result.output + log.getvalue()
    assert result.exit_code == code, output
    return _without_boxes(output)


def train_here(config: Path, *more: str, code: int = 0) -> str:
    """The same of the workflow of training."""
    return run_here("training", "--config", str(config), *more, code=code)


def _without_boxes(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def kill_a_slot_in_the_middle(store: ObjectStore, runs: Callable[[], bool]) -> str:
    """SIGKILL the first process that has journalled something and is not done, while it `runs`; its incarnation."""
    while runs():
        for key in store.list(layout.alive_all(next_iteration(store))):
            try:
                alive = records.read(store, HeartbeatRecord, key)
                store.get(layout.shard(next_iteration(store), alive.incarnation, 0), 0, 1)
            except ObjectMissing:
                continue
            if alive.state == "working":
                os.kill(alive.pid, signal.SIGKILL)
                return alive.incarnation
        time.sleep(0.01)
    raise AssertionError("no slot could be killed")
