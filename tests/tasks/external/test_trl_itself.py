"""TRL's own GRPOTrainer with a run's members: a kill of TRL's process changes no bit of the weights.

python -m pytest -m peers tests/tasks/external/test_trl_itself.py
"""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.peers, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
LIMIT_S = 600
STEPS = 3
PROGRAM = """
import hashlib, json, os, sys
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer
import gleaner

folder, steps, dies_after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def digits(completions, **_):
    return [sum(each.isdigit() for each in text) / 24 for text in completions]

class Death(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == dies_after:
            os.kill(os.getpid(), 9)

config = {
    "run": {"url": f"{folder}/run", "seed": 3, "num_generations": 4},
    "policy": {"path": f"{folder}/model"},
    "data": {"source": "submitted"},
    "rewards": [],
    "sampling": {"max_completion_length": 24},
    "rollout": {"engine": "torch", "flush_interval_s": 0.5, "device": "cpu"},
    "trainer": {"placement": "external"},
    "pools": {"rollout": {"count": 1}},
}
arguments = GRPOConfig(
    output_dir=f"{folder}/out", max_steps=steps, per_device_train_batch_size=8, num_generations=4,
    max_completion_length=24, learning_rate=1e-2, save_steps=1, report_to=[], use_cpu=True, bf16=False, seed=7,
    gradient_checkpointing=False, logging_steps=1,
)
trainer = GRPOTrainer(
    model=f"{folder}/model", reward_funcs=digits, args=arguments,
    train_dataset=Dataset.from_list([{"prompt": f"{k}+{k}="} for k in range(20)]),
    rollout_func=gleaner.trl.rollout_func(config),
)
trainer.add_callback(Death())
last = get_last_checkpoint(f"{folder}/out") if os.path.isdir(f"{folder}/out") else None
trainer.train(resume_from_checkpoint=last)
tensors = trainer.model.state_dict()
print(json.dumps([
    [entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
    hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest(),
]))
"""


def start(folder: Path, *program: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": ":".join([str(ROOT), *filter(None, sys.path)]), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, *program],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def train(folder: Path, deaths: tuple[int, ...]) -> object:
    """What TRL ends with, after so many deaths; a member generates beside."""
    member = start(folder, str(ROOT / "gleaner.py"), "join", str(folder / "run"), "--time-limit-s", str(LIMIT_S))
    try:
        for death in (*deaths, 0):
            program = start(folder, "-c", PROGRAM, str(folder), str(STEPS), str(death))
            out, err = program.communicate(timeout=LIMIT_S)
            assert program.returncode == (-signal.SIGKILL if death else 0), err
        return json.loads(out.splitlines()[-1])
    finally:
        member.terminate()
        member.communicate(timeout=LIMIT_S)


def test_a_killed_trl_ends_with_the_rewards_and_the_weights_of_an_undisturbed_one(tmp_path, model):
    if find_spec("trl") is None:
        pytest.skip("needs trl 1.16")
    ends = []
    for name, deaths in (("undisturbed", ()), ("killed", (1, 2))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model").symlink_to(model)
        ends.append(train(folder, deaths))
    assert ends[0] == ends[1]
