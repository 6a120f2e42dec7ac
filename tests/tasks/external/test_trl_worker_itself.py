"""TRL's own AsyncGRPOTrainer on a run's rollouts, on a CPU, with its process killed after every step.

TRL's attention kernel is for GPUs alone, and TRL asks for the name of a GPU; both have a stand-in here. The kernel's
computes the same attention with torch. Everything else is TRL's.

python -m pytest -m peers tests/tasks/external/test_trl_worker_itself.py
"""

import inspect
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasks.external.trl_worker import RolloutSample, RolloutWorker

pytestmark = [pytest.mark.peers, pytest.mark.slow]
STEPS = 3
PROGRAM = """
import hashlib, json, os, sys
from types import SimpleNamespace
import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from tasks.external import trl_worker
from tasks.external.rollouts import Rollouts
from tests.external_program import settings
from tests.small_run import roll_out
import gleaner

folder, steps, dies_after = sys.argv[1], *map(int, sys.argv[2:4])

def attention(query, key, value, ends_q, ends_k, max_q, max_k, softmax_scale, **_):
    found = []
    for (q0, q1), (k0, k1) in zip(ends_q.unfold(0, 2, 1).tolist(), ends_k.unfold(0, 2, 1).tolist(), strict=True):
        share = query.shape[1] // key.shape[1]
        q, k, v = (each.transpose(0, 1) for each in (query[q0:q1], key[k0:k1], value[k0:k1]))
        k, v = (each.repeat_interleave(share, 0) for each in (k, v))
        sees = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(~sees, -torch.inf)
        found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(found)

packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
async_grpo_trainer.get_peak_flops_per_device = lambda *_: None

class Rolled(Rollouts):
    def next(self, step):
        groups = super().next(step)
        roll_out(self.url, step)
        return groups

class Death(TrainerCallback):
    def on_save(self, args, state, control, **_):
        if state.global_step == dies_after:
            os.kill(os.getpid(), 9)

trl_worker.rollouts = Rolled  # whose members generate in this process
given = gleaner.trl.asynchronous(settings(
    f"{folder}/run", f"{folder}/model", algorithm={"max_staleness": 1}, retention={"keep_weights": 9},
    rollout={"engine": "torch", "device": "cpu"},
))
given["callbacks"].append(Death())
trainer = AsyncGRPOTrainer(
    model=f"{folder}/model", train_dataset=Dataset.from_list([{"prompt": "unused"}]), **given,
    args=AsyncGRPOConfig(
        output_dir=f"{folder}/out", max_steps=steps, per_device_train_batch_size=6, gradient_accumulation_steps=2,
        num_generations=3, max_completion_length=40, token_budget=0, learning_rate=1e-3, save_steps=1, report_to=[],
        use_cpu=True, bf16=False, gradient_checkpointing=False, logging_steps=1, max_staleness=1,
    ),
)
last = get_last_checkpoint(f"{folder}/out") if os.path.isdir(f"{folder}/out") else None
trainer.train(resume_from_checkpoint=last)
tensors = trainer.model.state_dict()
names = ("reward", "ratio", "sample/staleness_max")
print(json.dumps([
    [[entry[name] for name in names] for entry in trainer.state.log_history if "reward" in entry],
    hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest(),
    [*gleaner.open(f"{folder}/run").iterations],
]))
"""


@pytest.fixture(autouse=True)
def with_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where TRL is not installed."""
    if find_spec("trl") is None:
        pytest.skip("needs trl 1.16")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def life(folder: Path, dies_after: int = 0) -> list[object]:
    """What a life of TRL's process printed last; nothing for one that died."""
    path = ":".join([str(Path(__file__).parents[3]), *filter(None, sys.path)])
    given = [sys.executable, "-c", PROGRAM, str(folder), str(STEPS), str(dies_after)]
    done = subprocess.run(given, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if dies_after else 0), done.stderr[-2000:]
    return [] if dies_after else list(json.loads(done.stdout.splitlines()[-1]))


def test_a_trl_killed_after_every_step_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path, model: Path):
    ends = []
    for name, deaths in (("undisturbed", ()), ("killed", (1, 2))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model").symlink_to(model)
        for death in deaths:
            life(folder, death)
        ends.append(life(folder))
    (rewards, digest, concluded), (resumed, *other) = ends
    assert concluded == [*range(STEPS)]
    assert [digest, concluded] == other
    # Log-probs stand at their tokens: TRL's model, which has sampled the first step, computes the same.
    assert rewards[0][1] == pytest.approx(1.0, abs=1e-4)
    assert max(staleness for *_, staleness in rewards) == 1.0
    # The reward is logged with a micro-batch that is taken ahead, which a new process has not seen.
    assert len(resumed) == len(rewards)


def test_the_worker_has_what_trl_s_protocols_and_sample_have():
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker  # noqa: PLC0415

    theirs = [field.name for field in fields(async_rollout_worker.RolloutSample)]
    assert [field.name for field in fields(RolloutSample)] == theirs
    for protocol in (async_grpo_trainer.RolloutWorkerProtocol, async_grpo_trainer.WeightTransferProtocol):
        for name, method in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_"):
                ours = inspect.signature(getattr(RolloutWorker, name))
                assert list(ours.parameters) == list(inspect.signature(method).parameters), name
