"""Claim: TRL with a run's members ends with equal weights though both are killed, and learns as TRL alone.

Run: python -m benchmarks.external_trainer --json, where trl 1.16 is installed.
Arms: undisturbed; with a member killed in every second step while it writes, and TRL's process killed twice between two
steps, each by SIGKILL; and with --seeds N, TRL with its own generation beside ours, from N seeds. The policy is random,
of 0.4 million parameters. The reward is the share of digits. The learning rate is high, so each step changes tokens.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reporting import Target, finish
from storage.records import layout
from storage.records.run import next_iteration
from storage.stores.connect import connect

STEPS, SEED, LIMIT_S = 6, 7, 900
DEATHS = (1, 3)
LEARNING_STEPS = 20
# The mean reward of so many last steps is compared.
COMPARED_STEPS = 5
# As the difference between two runs of TRL alone from different seeds.
DIFFERENCE_MAX = 0.1
PROGRAM = """
import hashlib, json, os, sys
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer
import gleaner

folder, steps, dies_after, seed, ours = sys.argv[1], *map(int, sys.argv[2:6])

def digits(completions, **_):
    return [sum(each.isdigit() for each in text) / 24 for text in completions]

class Death(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == dies_after:
            os.kill(os.getpid(), 9)

config = {
    "run": {"url": f"{folder}/run", "seed": seed, "num_generations": 4},
    "policy": {"path": f"{folder}/model"},
    "data": {"source": "submitted"},
    "rewards": [],
    "sampling": {"max_completion_length": 24},
    "rollout": {"engine": "torch", "flush_interval_s": 0.1, "claim_ttl_s": 3.0, "device": "cpu"},
    "trainer": {"placement": "external"},
    "pools": {"rollout": {"count": 1}},
}
arguments = GRPOConfig(
    output_dir=f"{folder}/out", max_steps=steps, per_device_train_batch_size=16, num_generations=4,
    max_completion_length=24, learning_rate=3e-3, save_steps=1, report_to=[], use_cpu=True, bf16=False, seed=seed,
    gradient_checkpointing=False, logging_steps=1, lr_scheduler_type="constant",
)
trainer = GRPOTrainer(
    model=f"{folder}/model", reward_funcs=digits, args=arguments,
    train_dataset=Dataset.from_list([{"prompt": f"{k}+{k}="} for k in range(20)]),
    **({"rollout_func": gleaner.trl.rollout_func(config)} if ours else {}),
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


@dataclass(frozen=True)
class End:
    """What TRL ended with.

    Attributes:
        rewards: The mean reward of each step.
        digest: The digest of the weights.
        members_killed: How many members were killed.
    """

    rewards: list[float]
    digest: str
    members_killed: int = 0


def _start(folder: Path, *program: str) -> subprocess.Popen[str]:
    path = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": ":".join(path), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *program], cwd=folder, env=environment, text=True, stdout=pipe, stderr=pipe
    )


def _member(folder: Path) -> subprocess.Popen[str]:
    return _start(folder, "-m", "gleaner", "join", str(folder / "run"), "--time-limit-s", str(LIMIT_S))


@contextmanager
def _members(folder: Path, *, killed: bool) -> Iterator[list[int]]:
    """Two members generate; with `killed` one dies in every second step, while it writes, and another one comes.

    Yields the steps of the deaths.
    """
    living, ended, deaths = [_member(folder), _member(folder)], threading.Event(), list[int]()
    store = connect(str(folder / "run"))

    def kill() -> None:
        while not ended.wait(0.02):
            step = next_iteration(store)
            if step % 2 or step in deaths or not list(store.list(layout.journal(step))):
                continue
            deaths.append(step)
            victim = living.pop(0)
            victim.kill()
            victim.communicate()
            living.append(_member(folder))

    killer = threading.Thread(target=kill, name="killer")
    if killed:
        killer.start()
    try:
        yield deaths
    finally:
        ended.set()
        if killed:
            killer.join()
        for member in living:
            member.terminate()
            member.communicate(timeout=LIMIT_S)


def train(folder: Path, steps: int, deaths: Sequence[int] = (), *, seed: int = SEED, ours: bool = True) -> End:
    """Train in `folder`, which has a model; TRL's process dies after the steps in `deaths`, and members beside it."""
    with _members(folder, killed=bool(deaths)) as killed:
        for death in (*deaths, 0):
            given = [str(folder), *map(str, (steps, death, seed, int(ours)))]
            program = _start(folder, "-c", PROGRAM, *given)
            out, err = program.communicate(timeout=LIMIT_S)
            if program.returncode != (-signal.SIGKILL if death else 0):
                raise RuntimeError(f"TRL's process ended with {program.returncode}: {err[-2000:]}")
        rewards, digest = json.loads(out.splitlines()[-1])
    return End(rewards, digest, len(killed))


def _learned(end: End) -> float:
    return statistics.fmean(end.rewards[-COMPARED_STEPS:])


def main() -> None:
    """Run the arms, print the figures, and end with 1 if a target is missed."""
    from examples.warm_start import build_model, build_tokenizer  # noqa: PLC0415 - torch is imported here

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true")
    options.add_argument("--seeds", type=int, default=0, help="compare the learning with TRL's own generation")
    given = options.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(f"{root}/model")
        build_model(len(tokenizer)).save_pretrained(f"{root}/model")

        def folder(name: str) -> Path:
            made = Path(root, name)
            made.mkdir()
            (made / "model").symlink_to(Path(root, "model"))
            return made

        undisturbed = train(folder("undisturbed"), STEPS)
        disturbed = train(folder("disturbed"), STEPS, DEATHS)
        targets = [
            Target("TRL's deaths", float(len(DEATHS)), ">= 2"),
            Target("members killed", float(disturbed.members_killed), f">= {STEPS // 2}"),
            Target("rewards that differ", float(undisturbed.rewards != disturbed.rewards), "== 0"),
            Target("weights that differ", float(undisturbed.digest != disturbed.digest), "== 0"),
        ]
        pairs = [
            [_learned(train(folder(f"{seed}-{ours}"), LEARNING_STEPS, seed=seed, ours=ours)) for ours in (True, False)]
            for seed in range(given.seeds)
        ]
    if pairs:
        gaps = [ours - alone for ours, alone in pairs]
        spread = (min(gaps), max(gaps))
        targets.append(Target("reward less TRL's own", statistics.fmean(gaps), f">= -{DIFFERENCE_MAX}", spread))
    rows = [{"step": step, "reward": reward} for step, reward in enumerate(undisturbed.rewards)]
    results = {"learning": pairs, "seconds": time.monotonic() - began_s}
    finish("external_trainer", rows, targets, as_json=given.json, results=results)


if __name__ == "__main__":
    main()
