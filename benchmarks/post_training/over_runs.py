"""Claim: a policy learns from the responses that a finished run stored, by SFT on the right ones and by DPO on pairs.

The demo's task. A source run stores 1,024 responses of one weight version, and trains nothing. Both arms of a seed read
the source's journal, begin with the policy that sampled it, and sample nothing themselves.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.learning_run import EXECUTION, WARM_START, make_run
from benchmarks.post_training.curve import Curve, iterate, learn, rows
from benchmarks.post_training.part import Outcome
from benchmarks.reporting import Target
from examples.warm_start import warm_start
from storage.records.run import release_lease
from storage.stores.connect import connect

ITERATIONS = 6
PROMPTS, RESPONSES = 128, 8
SFT, DPO = "sft over runs", "dpo over runs"


def arms(source: str) -> dict[str, dict[str, Any]]:
    """The sections of each arm beside those of `make_run`, by the arm's name. source: the URL of the stored run."""
    right = {"runs": [source], "select": {"reward": [1, 1], "per_prompt": 1}}
    pairs = {"runs": [source], "select": {"per_prompt": 1}}
    # With rpo_alpha 0, the chosen responses become less likely after some steps, and the reward falls again.
    preferring = {"kind": "dpo", "beta": 0.5, "rpo_alpha": 1.0}
    return {
        SFT: {"rewards": [], "data": right, "algorithm": {"kind": "sft"}},
        DPO: {"rewards": [], "data": pairs, "algorithm": preferring},
    }


def store_source(folder: Path, model: Path, seed: int) -> str:
    """Store a run of one iteration, whose version 1 is version 0; returns its URL."""
    shape = {"num_prompts_per_step": PROMPTS, "num_generations": RESPONSES}
    run = make_run(
        folder,
        model,
        seed,
        killed=False,
        run={"url": str(folder / "source"), "seed": seed} | shape,
        optimizer={"learning_rate": 0.0},
    )
    iterate(run)
    release_lease(connect(run.config.run.url), EXECUTION)
    return run.config.run.url


def targets(curves: Mapping[str, Sequence[Curve]]) -> list[Target]:
    """For each arm: the mean gain is above 0, and each seed's gain is."""
    found = []
    for name, each in curves.items():
        gains, label = [curve.gain for curve in each], name.replace(" ", "_")
        found.append(Target(f"{label}_gain_mean", statistics.fmean(gains), "> 0"))
        found.append(Target(f"{label}_seeds_that_gain", sum(gain > 0 for gain in gains), f">= {len(gains)}"))
    return found


def measure(folder: Path, seeds: Sequence[int]) -> Outcome:
    """Train the policy, then store the source of each seed, and run both arms over it."""
    model = folder / "model"
    warm_start(model, WARM_START, lambda _step, _loss: None)
    curves: dict[str, list[Curve]] = {SFT: [], DPO: []}
    for seed in seeds:
        own = folder / f"seed-{seed}"
        source = store_source(own, model, seed)
        for number, (name, sections) in enumerate(arms(source).items()):
            run = make_run(own / f"arm-{number}", model, seed, killed=False, **sections)
            curves[name].append(learn(run, model, ITERATIONS))
    results = {name: [asdict(curve) for curve in each] for name, each in curves.items()}
    return Outcome(list(rows(curves)), targets(curves), {"curves": results})
