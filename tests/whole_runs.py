"""Whole runs as a user makes them: `pyflyte run` with real processes, and a directory or a bucket as the store."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from storage import layout, records
from storage.records import AliveRecord
from storage.run import next_iteration
from storage.store import ObjectMissing, ObjectStore

ROOT = Path(__file__).parents[1]
PYFLYTE = [str(Path(sys.executable).parent / "pyflyte"), "--config", str(ROOT / "flyte.config"), "run"]
# Many times what a run takes on an idle machine.
LIMIT_S = 1500
# A member that decodes few responses at a time takes so long that it can be killed in the middle.
KILLABLE: dict[str, dict[str, Any]] = {
    "rollout": {"max_responses_in_flight": 8},
    "sampling": {"max_completion_length": 80},
}
# Each further slot is a process that imports flytekit, and torch with our own engine.
ONE_SLOT: dict[str, Any] = {"rollout": {"count": 1, "interruptible": True}}


def config_file(folder: Path, model: Path, url: str, **sections: dict[str, Any]) -> Path:
    """A configuration of 2 slots of our own engine and 32 responses; `sections` extend or replace fields of it."""
    document: dict[str, Any] = {
        "run": {"url": url, "seed": 3, "num_prompts_per_step": 8, "num_generations": 4},
        "policy": {"path": str(model)},
        "data": {"source": "arithmetic", "size": 20},
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": 40},
        "rollout": {
            "engine": "torch",
            "context_length": 240,
            "max_responses_in_flight": 16,
            "flush_interval_s": 0.1,
            "heartbeat_interval_s": 0.1,
        },
        "optimizer": {"learning_rate": 1e-4},
        "trainer": {"poll_interval_s": 0.05, "group_timeout_s": 3600},
        "pools": {"rollout": {"count": 2, "interruptible": True}},
    }
    for name, values in sections.items():
        document[name] = document.get(name, {}) | values if isinstance(values, dict) else values
    folder.mkdir(exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def pyflyte(workflow: str, *arguments: str) -> "subprocess.Popen[str]":
    """`pyflyte run` of one of our workflows."""
    command = [*PYFLYTE, str(ROOT / "workflows" / f"{workflow}.py"), workflow, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def training(config: Path, *more: str) -> "subprocess.Popen[str]":
    """`pyflyte run` of the workflow of training."""
    return pyflyte("training", "--config", str(config), *more)


def ended(child: "subprocess.Popen[str]", *, code: int = 0) -> str:
    """What a process with this exit status has printed, without the lines of Flyte's boxes."""
    output, _ = child.communicate(timeout=LIMIT_S)
    assert child.returncode == code, output
    return " ".join(output.replace("│", " ").split())


def kill_a_slot_in_the_middle(store: ObjectStore, child: "subprocess.Popen[str]") -> str:
    """SIGKILL the first process that has journalled something and is not done; returns its incarnation."""
    while child.poll() is None:
        for key in store.list(layout.alive_all(next_iteration(store))):
            try:
                alive = records.read(store, AliveRecord, key)
                store.get(layout.shard(next_iteration(store), alive.incarnation, 0), 0, 1)
            except ObjectMissing:
                continue
            if alive.state == "working":
                os.kill(alive.pid, signal.SIGKILL)
                return alive.incarnation
        time.sleep(0.01)
    raise AssertionError(f"no slot could be killed:\n{child.communicate()[0]}")
