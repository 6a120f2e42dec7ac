"""Claim: recording an iteration's groups in one task and training them in another costs less than 1 %, and no bit.

Each round trains copies of one rolled-out iteration in one process, in turns: by the train task alone (`own`), and by a
collector that records all groups and a train task that replays them. What the collector takes is an upper bound of the
cost, because the train task behind it grades nothing any more. Times are processor time of all threads, because
differences of a per cent drown in the wall clock of a shared machine. What a second pod costs to start is not measured.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.reporting import Measured, Target, finish, interleave, ratios
from examples.warm_start import build_tokenizer
from storage.clock import SystemClock
from storage.records import layout
from storage.stores.connect import connect
from storage.weights.tensor_sets import read_manifest
from tasks.configuration import run_config
from tasks.configuration.run_config import RunConfig, parse
from tasks.learning.collecting import collect
from tasks.learning.train_iteration import train_iteration
from tasks.preparing.iteration import prepare
from tasks.sampling.session.member import generate_slot

EXECUTION = "benchmark"
COST_MAX = 0.01
OWN, APART = "own", "recorded apart"
# Width and layers; the smallest is about as large as the demo's. The claim is about the largest: a step of a real model
# takes a thousand times as long again.
SIZES = {"0.4 M parameters": (128, 2), "5 M parameters": (256, 6)}
CLAIMED = "5 M parameters"


def settings(url: str, model: Path, prompts: int) -> RunConfig:
    """The demo's task with its model; all groups are recorded before the train phase."""
    return parse(
        {
            "run": {"url": url, "seed": 7, "num_prompts_per_step": prompts, "num_generations": 8},
            "policy": {"path": str(model)},
            "data": {"source": "arithmetic", "limit": 4096},
            "rewards": [{"function": "arithmetic"}],
            "sampling": {"max_completion_length": 112},
            "rollout": {
                "engine": "torch",
                "context_length": 192,
                "max_responses_in_flight": 64,
                "flush_interval_s": 0.05,
            },
            "optimizer": {"learning_rate": 1e-4},
            "planning": {"seeding": "off"},
            "trainer": {
                "placement": "pod",
                "group_timeout_s": 600,
                "micro_batch_tokens_max": 4096,
            },
            "pools": {"rollout": {"count": 1}},
        }
    )


def make_origin(folder: Path, size: str, prompts: int) -> Path:
    """The directory of a run whose first iteration is rolled out and not trained."""
    tokenizer, (width, layers) = build_tokenizer(), SIZES[size]
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    run, clock = folder / "origin", SystemClock()
    reference, _ = prepare(settings(str(run), folder / "model", prompts), EXECUTION, clock)
    generate_slot(str(run), reference.iteration, 0, lambda: False, clock)
    return run


def digests(run: Path) -> dict[str, str]:
    """The digests of all tensors that a step publishes: weights, parameters and moments."""
    store, found = connect(str(run)), dict[str, str]()
    for folder in (layout.weights(1), layout.checkpoint(1)):
        tensors = read_manifest(store, folder).tensors
        found |= {f"{folder}{name}": entry.digest for name, entry in tensors.items()}
    return found


class Copies:
    """Copies of the origin that are trained. found: the tensors of each. collector_s: what the collector took."""

    def __init__(self, origin: Path) -> None:
        self._origin = origin
        self.found: list[dict[str, str]] = []
        self.collector_s: list[float] = []

    def train(self, arm: str) -> float:
        """Train one copy; returns seconds of processor time."""
        run, clock = self._origin.with_name("copy"), SystemClock()
        shutil.copytree(self._origin, run)
        began_s = time.process_time()
        if arm == APART:
            with patch.object(run_config, "PHASE_START_SHARE", 1.0):
                collect(str(run), 0, EXECUTION, clock)
            self.collector_s.append(time.process_time() - began_s)
        train_iteration(str(run), 0, EXECUTION, clock)
        took_s = time.process_time() - began_s
        self.found.append(digests(run))
        shutil.rmtree(run)
        return took_s


@dataclass(frozen=True)
class Found:
    """Processor seconds of each round, by arm and of the collector alone, and how many copies have other tensors."""

    seconds: Mapping[str, Sequence[float]]
    collector_s: Sequence[float]
    tensors: int
    unequal: int

    @property
    def most(self) -> Measured:
        """The part of a step that recording apart costs at most."""
        return ratios(self.collector_s, self.seconds[OWN])


def measure(size: str, prompts: int, rounds: int) -> Found:
    """Train copies in turns, after one of each arm that does not count, because first calls import and compile."""
    with tempfile.TemporaryDirectory() as temporary:
        copies = Copies(make_origin(Path(temporary), size, prompts))
        for arm in (OWN, APART):
            copies.train(arm)
        copies.collector_s.clear()
        arms: dict[str, Callable[[], float]] = {arm: partial(copies.train, arm) for arm in (OWN, APART)}
        seconds = interleave(arms, rounds)
    unequal = sum(each != copies.found[0] for each in copies.found)
    return Found(seconds, copies.collector_s, len(copies.found[0]), unequal)


def report(found: Mapping[str, Found], notes: Mapping[str, int], *, as_json: bool) -> None:
    """Print table, targets and JSON."""
    rows: list[dict[str, Any]] = [
        {
            "model": size,
            "own, s": statistics.median(each.seconds[OWN]),
            "collector, s": statistics.median(each.collector_s),
            "collector over own": each.most,
            "both over own": ratios(each.seconds[APART], each.seconds[OWN]),
            "tensors": each.tensors,
            "copies with others": each.unequal,
        }
        for size, each in found.items()
    ]
    targets = [
        found[CLAIMED].most.target(f"cost_of_recording_apart_at_most_{CLAIMED.replace(' ', '_')}", f"<= {COST_MAX}"),
        Target("copies_with_other_tensors", float(sum(each.unequal for each in found.values())), "== 0"),
    ]
    finish("sharing_collecting", rows, targets, as_json=as_json, notes=notes)


def main() -> None:
    """Parse, train, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 1 or options.prompts < 1:
        parser.error(f"--rounds, --prompts: value {options.rounds}, {options.prompts}; allowed: at least 1")
    torch.set_num_threads(1)
    found = {size: measure(size, options.prompts, options.rounds) for size in SIZES}
    report(found, {"rounds": options.rounds, "prompts": options.prompts}, as_json=options.json)


if __name__ == "__main__":
    main()
