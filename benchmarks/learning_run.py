"""A small run of the demo's task for `benchmarks.learning`: it trains one iteration at a time, and is evaluated."""

import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.crew_processes import Crew, slot_process
from examples.warm_start import WarmStart
from storage.clock import SystemClock
from storage.journal.noise_keys import noise_key
from storage.records import layout
from storage.records.records import ReportRecord, SamplingParams
from storage.stores.connect import connect
from storage.weights.tensor_sets import read_manifest
from storage.weights.versions import pull_version
from tasks.configuration.data import ArithmeticConfig
from tasks.configuration.run_config import RunConfig, parse
from tasks.learning.train_iteration import train_iteration
from tasks.preparing.iteration import prepare
from tasks.prompts.arithmetic import ArithmeticPrompts
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.torch_engine import TorchEngine

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
        reference, [slots] = prepare(self.config, EXECUTION, clock)
        rng = random.Random(f"{seed}/{iteration}")
        schedule = [[rng.randint(100, 700)] if self.killed else [] for _ in slots]
        self.crew.run(slot_process, [(reference.run_url, reference.iteration, slot) for slot in slots], schedule)
        train_iteration(reference.run_url, reference.iteration, EXECUTION, clock)
        store = connect(reference.run_url)
        return conclude_iteration(store, reference.iteration, {"rollout": 0.0, "train": 0.0}, clock)

    def final_weights(self, version: int) -> list[str]:
        """Digests of all tensors of a weight version."""
        manifest = read_manifest(connect(self.config.run.url), layout.weights(version))
        return [entry.digest for _, entry in sorted(manifest.tensors.items())]

    def evaluate(self, version: int, model: Path) -> float:
        """The mean reward of a weight version on held-out problems, sampled with the same noise for every version."""
        tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
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


def make_run(folder: Path, model: Path, seed: int, *, killed: bool, **sections: Any) -> Run:
    """Create a run; `sections` replace those of the configuration."""
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
        },
        "algorithm": {"loss_agg_mode": "seq-mean-token-mean"},
        "optimizer": {"learning_rate": 3e-4, "betas": [0.9, 0.99], "warmup_steps": 2},
        "trainer": {"group_timeout_s": 60.0},
        "pools": {"rollout": {"count": SLOTS, "interruptible": True}},
    }
    return Run(parse(document | sections), Crew(folder / f"{name}-logs"), killed)
