"""Claim: random weights learn a task from worked examples by SFT, and GRPO goes on from there.

The demo's task and model. The run of SFT begins with random weights and learns the worked examples of the demo's warm
start, which have noisy steps; the run of GRPO begins with the last version of the run of SFT. Each seed has weights,
examples and prompts of its own.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.learning_run import WARM_START, make_run
from benchmarks.post_training.curve import Curve, learn
from benchmarks.post_training.part import Outcome
from benchmarks.reporting import Target, measured
from examples.warm_start import WarmStart, save_random, write_examples

SFT_ITERATIONS, GRPO_ITERATIONS = 4, 6
STEPS = WARM_START.steps // SFT_ITERATIONS
SFT_GAIN = 0.2


@dataclass(frozen=True)
class Chain:
    """What the two runs of a seed learned, one after the other.

    Attributes:
        sft: The curve from random weights.
        grpo: The curve from the last version of `sft`.
    """

    sft: Curve
    grpo: Curve


def sections_of_sft(folder: Path, seed: int, warm_start: WarmStart) -> dict[str, Any]:
    """The sections of the run of SFT beside those of `make_run`. folder: has the examples."""
    return {
        "run": {"url": str(folder / "sft"), "seed": seed, "num_prompts_per_step": STEPS * warm_start.batch},
        "data": {"source": str(folder / "examples.jsonl"), "shuffle": False},
        "rewards": [],
        "algorithm": {"kind": "sft", "num_mini_batches": STEPS},
        "optimizer": {
            "learning_rate": warm_start.learning_rate,
            "betas": [0.9, 0.999],
            "warmup_steps": 20,
            "schedule": "cosine",
            "total_steps": warm_start.steps,
        },
    }


def sections_of_grpo(folder: Path, seed: int) -> dict[str, Any]:
    """The sections of the run of GRPO beside those of `make_run`."""
    begins = {"from": f"{folder / 'sft'}@{SFT_ITERATIONS}"}
    return {
        "run": {"url": str(folder / "grpo"), "seed": seed, "num_prompts_per_step": 24, "num_generations": 8} | begins
    }


def run_chain(folder: Path, seed: int) -> Chain:
    """Train the two runs of a seed in an empty folder."""
    warm_start, model = replace(WARM_START, seed=1 + seed), folder / "random"
    save_random(model, warm_start)
    write_examples(folder / "examples.jsonl", warm_start)
    sft = make_run(folder, model, seed, killed=False, **sections_of_sft(folder, seed, warm_start))
    learned = learn(sft, model, SFT_ITERATIONS)
    grpo = make_run(folder, model, seed, killed=False, **sections_of_grpo(folder, seed))
    return Chain(learned, learn(grpo, model, GRPO_ITERATIONS))


def targets(chains: Sequence[Chain]) -> list[Target]:
    """SFT raises the reward over that of random weights with each seed, and GRPO raises it further."""
    return [
        measured([chain.sft.gain for chain in chains]).target("sft_over_random_weights", f">= {SFT_GAIN}"),
        measured([chain.grpo.gain for chain in chains]).target("grpo_over_sft", "> 0"),
    ]


def row(seed: int, chain: Chain) -> dict[str, Any]:
    """The table's row of a seed: held-out rewards."""
    return {
        "seed": seed,
        "random weights": round(chain.sft.held_out[0], 3),
        "after SFT": round(chain.sft.last, 3),
        "after GRPO": round(chain.grpo.last, 3),
    }


def measure(folder: Path, seeds: Sequence[int]) -> Outcome:
    """Train both runs of each seed."""
    chains = {}
    for seed in seeds:
        own = folder / f"seed-{seed}"
        own.mkdir()
        chains[seed] = run_chain(own, seed)
    results = {str(seed): asdict(chain) for seed, chain in chains.items()}
    return Outcome([row(*each) for each in chains.items()], targets(list(chains.values())), {"curves": results})
