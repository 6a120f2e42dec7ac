"""Tasks of the control pool where torch and vLLM are not installed, as in the image `control`: by their containers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flyteidl.core import errors_pb2, literals_pb2
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import LiteralMap

from storage.records import layout
from storage.records.run import exists
from storage.stores.connect import connect
from tasks.collect import collect
from tasks.conclude import conclude
from tasks.configuration.references import TrainOutcome
from tasks.configuration.run_config import dump
from tasks.evaluate import evaluate
from tasks.export_policy import export_policy
from tasks.plan import plan
from tests.evaluated_run import EVALUATION
from tests.processes import LIMIT_S, ROOT, container_of
from tests.small_run import OWN_REWARD, config, roll_out, train_small
from workflows.images import ENVIRONMENT

pytestmark = pytest.mark.slow
MODELS = ("torch", "vllm", "triton", "liger_kernel", "peft")
TASKS = sorted(f"tasks.{file.stem}" for file in (ROOT / "tasks").glob("*.py") if file.stem != "__init__")
# What Python's own finder then does not find, in this process and in all below it.
HIDING = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""
WIRED = """
import json, sys
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
task = sys.modules["tasks.train_elastic"].elastic_trainer(3, 4)
print(json.dumps([task.task_type, task.task_config.nnodes, task.min_nodes, task.max_nodes, task.rdzv_backend]))
import torch
"""


@pytest.fixture
def without(tmp_path):
    """without(*packages) -> the PYTHONPATH of processes in which these are not installed."""

    def path(*packages):
        folder = tmp_path / "without"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(HIDING.format(packages))
        return os.pathsep.join([str(folder), str(ROOT)])

    return path


@pytest.fixture
def run_task(tmp_path, without):
    """run_task(task, **inputs) -> (outputs of its container, in which MODELS are not installed; its log)."""
    environment = ENVIRONMENT | {"PYTHONPATH": without(*MODELS)}

    def run(task, **inputs):
        files: Path = tmp_path / task.name.rpartition(".")[2]
        with container_of(task, inputs, files, str(files), **environment) as process:
            assert process.wait(LIMIT_S) == 0, (files / "log").read_text()
        error, outputs = errors_pb2.ErrorDocument(), literals_pb2.LiteralMap()
        if (files / "out" / "error.pb").exists():
            error.ParseFromString((files / "out" / "error.pb").read_bytes())
        assert error.error.message == ""
        outputs.ParseFromString((files / "out" / "outputs.pb").read_bytes())
        values = TypeEngine.literal_map_to_kwargs(
            FlyteContextManager.current_context(), LiteralMap.from_flyte_idl(outputs), task.python_interface.outputs
        )
        return [values[name] for name in task.python_interface.outputs], (files / "log").read_text()

    return run


def test_an_iteration_is_planned_collected_concluded_evaluated_and_exported(model, tmp_path, run_task):
    url = str(tmp_path / "run")
    evaluation = EVALUATION | {"interval": 1}
    settings = dump(config(url, model, rewards=OWN_REWARD, evaluation=evaluation, teacher={"path": str(model)}))
    [reference, slots, *_], log = run_task(plan, config=settings, after=-1, pools=["rollout"])
    assert slots == [[0, 1]]
    assert "not sure: whether engine and trainer can use the model, because torch is not installed here" in log
    assert exists(connect(url), layout.manifest(layout.teacher("teacher")))
    roll_out(url, 0)
    _, log = run_task(collect, plan=reference)
    assert "PyTorch" not in log
    train_small(url, 0)
    trained = TrainOutcome(plan=reference, weight_version=1, reward=0.0)
    [outcome, planned, slots, _], _ = run_task(conclude, trained=trained, last=True, config=settings)
    assert (outcome.weight_version, slots) == (1, [0, 1])
    roll_out(planned.run_url, 0)
    [evaluated], _ = run_task(evaluate, plan=planned)
    assert evaluated.weight_version == 1
    [directory, _], _ = run_task(export_policy, concluded=outcome, count=1, dtype="bfloat16")
    assert (Path(str(directory.path)) / "model.safetensors").is_file()


def test_every_task_is_wired_where_neither_torch_nor_transformers_is_installed(without):
    environment = {**os.environ, "PYTHONPATH": without(*MODELS, "transformers", "datasets")}
    command = [sys.executable, "-c", WIRED, *TASKS]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=ROOT, env=environment
    )
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'torch'"
    assert json.loads(done.stdout) == ["pytorch", 3, 3, 3, "c10d"]
