"""Claim: kills change nothing that is learned. Reward curves with and without SIGKILLs are equal to the last digit.

Per seed two runs of the demo's task take turns, iteration by iteration: one undisturbed, one whose workers are killed
in every iteration. The policy is warm-started first, on short problems, so that the whole fits a laptop's minute.
"""

import argparse
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.crew import Crew, slot_process
from benchmarks.reporting import Target, finish
from examples.warm_start import WarmStart, warm_start
from storage import layout
from storage.clock import SystemClock
from storage.connect import connect
from storage.records import ReportRecord, SamplingParams
from storage.run import release_lease
from storage.weight_versions import pull_version
from storage.weights import read_manifest
from tasks.configuration.run_config import RunConfig, parse
from tasks.learning.advance import advance
from tasks.plan import prepare
from tasks.prompts.arithmetic import ArithmeticPrompts
from tasks.prompts.config import ArithmeticConfig
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.engine import GenerationRequest, noise_key
from tasks.sampling.torch_engine import TorchEngine

SLOTS = 2
HELD_OUT = 256
TASK = ArithmeticConfig(items_max=6, stop_probability=0.35)
WARM_START = WarmStart(steps=280, batch=32, learning_rate=2e-3, task=TASK)
EXECUTION = "benchmark"


@dataclass(frozen=True)
class Run:
    """One run of one seed, with or without kills."""

    config: RunConfig
    crew: Crew
    killed: bool

    def iterate(self, seed: int, iteration: int) -> ReportRecord:
        """Plan, roll out in killable processes, train, conclude."""
        clock = SystemClock()
        reference, slots = prepare(self.config, EXECUTION, clock)
        rng = random.Random(f"{seed}/{iteration}")
        schedule = [[rng.randint(100, 700)] if self.killed else [] for _ in slots]
        self.crew.run(slot_process, [(reference.run_url, reference.iteration, slot) for slot in slots], schedule)
        advance(reference.run_url, reference.iteration, EXECUTION, clock)
        store = connect(reference.run_url)
        return conclude_iteration(store, reference.iteration, {"rollout": 0.0, "train": 0.0}, clock)

    def final_weights(self, version: int) -> list[str]:
        """Digests of all tensors of a weight version."""
        manifest = read_manifest(connect(self.config.run.url), layout.weights(version))
        return [entry.digest for _, entry in sorted(manifest.tensors.items())]

    def evaluate(self, version: int, model: Path) -> float:
        """Mean reward of a weight version on held-out problems, sampled with the same noise for every version."""
        tokenizer = AutoTokenizer.from_pretrained(str(model))
        problems = list(ArithmeticPrompts(HELD_OUT, 987_654, TASK))
        engine = TorchEngine(model, max_responses_in_flight=HELD_OUT, context_length=96)
        engine.load_weights(version, pull_version(connect(self.config.run.url), version, None, SystemClock())[1])
        params = SamplingParams(max_completion_length=64, stop_token_ids=(2,))
        prompts = [tuple(tokenizer(problem.text_or_messages)["input_ids"]) for problem in problems]
        engine.start([GenerationRequest(k, k, ids, (), noise_key(1, 0, k), params) for k, ids in enumerate(prompts)])
        tokens: dict[int, list[int]] = {k: [] for k in range(HELD_OUT)}
        while deltas := engine.step():
            for delta in deltas:
                tokens[delta.response] += delta.token_ids
        texts = [tokenizer.decode(tokens[k], skip_special_tokens=True) for k in range(HELD_OUT)]
        right = [text == problem.columns["worked"] for text, problem in zip(texts, problems, strict=True)]
        return statistics.fmean(map(float, right))


def make_run(folder: Path, model: Path, seed: int, *, killed: bool) -> Run:
    name = f"{seed}-{'killed' if killed else 'calm'}"
    document = {
        "run": {"url": str(folder / name), "seed": seed, "num_prompts_per_step": 24, "num_generations": 8},
        "policy": {"path": str(model)},
        "data": {
            "source": "arithmetic",
            "seed": seed,
            "arithmetic": {"items_max": TASK.items_max, "stop_probability": TASK.stop_probability},
        },
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": 64},
        "rollout": {
            "engine": "torch",
            "context_length": 96,
            "max_responses_in_flight": 4,
            "flush_interval_s": 0.05,
            "heartbeat_interval_s": 0.05,
        },
        "algorithm": {"loss_agg_mode": "seq-mean-token-mean"},
        "optimizer": {"learning_rate": 3e-4, "beta2": 0.99, "warmup_steps": 2},
        "trainer": {"poll_interval_s": 0.01, "group_timeout_s": 60.0},
        "pools": {"rollout": {"count": SLOTS, "interruptible": True}},
    }
    return Run(parse(document), Crew(folder / f"{name}-logs"), killed)


def run_seed(folder: Path, model: Path, seed: int, iterations: int) -> dict[str, Any]:
    """Both runs of a seed, an iteration of each in turn."""
    runs = [make_run(folder, model, seed, killed=killed) for killed in (False, True)]
    curves: list[list[ReportRecord]] = [[], []]
    for iteration in range(iterations):
        for run, curve in zip(runs, curves, strict=True):
            curve.append(run.iterate(seed, iteration))
    for run in runs:
        release_lease(connect(run.config.run.url), EXECUTION)
    calm, killed = curves
    return {
        "seed": seed,
        "before": runs[0].evaluate(0, model),
        "after": runs[0].evaluate(iterations, model),
        "after_killed": runs[1].evaluate(iterations, model),
        "curve": [report.metrics["reward"] for report in calm],
        "curve_killed": [report.metrics["reward"] for report in killed],
        "rewards_equal": [a.rewards for a in calm] == [b.rewards for b in killed],
        "lengths_equal": [a.lengths for a in calm] == [b.lengths for b in killed],
        "weights_equal": runs[0].final_weights(iterations) == runs[1].final_weights(iterations),
        "kills": sum(len(run.crew.kills) for run in runs),
        "recovered": sum(int(report.metrics["resume/tokens_recovered"]) for report in killed),
    }


def report(seeds: list[dict[str, Any]], iterations: int, *, as_json: bool) -> None:
    """Table, targets, JSON."""
    rows = [
        {
            "seed": one["seed"],
            "reward before": one["before"],
            "reward after": one["after"],
            "reward after, killed": one["after_killed"],
            "kills": one["kills"],
            "tokens recovered": one["recovered"],
            "rewards equal": one["rewards_equal"],
            "lengths equal": one["lengths_equal"],
            "final weights bit-equal": one["weights_equal"],
        }
        for one in seeds
    ]
    targets = [
        Target("seeds_with_equal_reward_curves", sum(one["rewards_equal"] for one in seeds), f">= {len(seeds)}"),
        Target("seeds_with_bit_equal_weights", sum(one["weights_equal"] for one in seeds), f">= {len(seeds)}"),
        Target("seeds_whose_reward_rises", sum(one["after"] > one["before"] for one in seeds), f">= {len(seeds)}"),
        Target("reward_gain_mean", statistics.fmean(one["after"] - one["before"] for one in seeds), "> 0.05"),
    ]
    results = {"curves": {str(one["seed"]): [one["curve"], one["curve_killed"]] for one in seeds}}
    finish("learning", rows, targets, as_json=as_json, notes={"iterations": iterations}, results=results)


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        warm_start(folder / "model", WARM_START, lambda _step, _loss: None)
        Crew(folder / "none").warm_up()
        seeds = [run_seed(folder, folder / "model", seed, given.iterations) for seed in range(given.seeds)]
    report(seeds, given.iterations, as_json=given.json)


if __name__ == "__main__":
    main()
