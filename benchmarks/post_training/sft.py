"""Claim: random weights learn a task from worked examples by SFT as well as in a loop of PyTorch, and GRPO goes on.

The demo's task and model. The run of SFT begins with random weights and learns the worked examples of the demo's warm
start, which have noisy steps; the loop takes the same weights, examples and steps. The run of GRPO begins with the last
version of the run of SFT. Each seed has weights, examples and prompts of its own.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.learning_run import EXECUTION, WARM_START, make_run
from benchmarks.post_training.curve import Curve, learn
from benchmarks.post_training.part import Outcome
from benchmarks.reporting import Target, measured
from examples.warm_start import WarmStart, save_random, warm_start, write_examples
from storage.clock import SystemClock
from tasks.preparing.iteration import prepare

SFT_ITERATIONS, GRPO_ITERATIONS = 4, 6
STEPS = WARM_START.steps // SFT_ITERATIONS
SFT_GAIN, LOOP_DIFFERENCE = 0.2, 0.05
# Of the peak learning rate, the loop leaves a tenth for the last step.
STEPS_TO_ZERO = round(WARM_START.steps / 0.9)


@dataclass(frozen=True)
class Chain:
    """What the two runs of a seed learned, one after the other.

    Attributes:
        sft: The curve from random weights.
        grpo: The curve from the last version of `sft`.
        loop: The held-out reward after the loop.
    """

    sft: Curve
    grpo: Curve
    loop: float


def sections_of_sft(folder: Path, seed: int, settings: WarmStart) -> dict[str, Any]:
    """The sections of the run of SFT beside those of `make_run`. folder: has the examples."""
    return {
        "run": {"url": str(folder / "sft"), "seed": seed, "num_prompts_per_step": STEPS * settings.batch},
        "data": {"source": str(folder / "examples.jsonl"), "shuffle": False},
        "rewards": [],
        "algorithm": {"kind": "sft", "num_mini_batches": STEPS},
        "optimizer": {
            "learning_rate": settings.learning_rate,
            "betas": [0.9, 0.999],
            "warmup_steps": 20,
            "schedule": "linear",
            "total_steps": STEPS_TO_ZERO,
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
    settings, model = replace(WARM_START, seed=1 + seed), folder / "random"
    save_random(model, settings)
    write_examples(folder / "examples.jsonl", settings)
    sft = make_run(folder, model, seed, killed=False, **sections_of_sft(folder, seed, settings))
    learned = learn(sft, model, SFT_ITERATIONS)
    grpo = make_run(folder, model, seed, killed=False, **sections_of_grpo(folder, seed))
    return Chain(learned, learn(grpo, model, GRPO_ITERATIONS), after_loop(folder, seed, settings))


def after_loop(folder: Path, seed: int, settings: WarmStart) -> float:
    """The held-out reward after the loop."""
    warm_start(folder / "looped", settings, lambda _step, _loss: None)
    # Measured as a run's versions are.
    looped = make_run(folder / "loop", folder / "looped", seed, killed=False)
    prepare(looped.config, EXECUTION, SystemClock())
    return looped.evaluate(0, folder / "looped")


def targets(chains: Sequence[Chain]) -> list[Target]:
    """SFT raises the reward over that of random weights with each seed, as the loop does; GRPO raises it further."""
    apart = statistics.fmean(chain.sft.last - chain.loop for chain in chains)
    return [
        measured([chain.sft.gain for chain in chains]).target("sft_over_random_weights", f">= {SFT_GAIN}"),
        measured([chain.grpo.gain for chain in chains]).target("grpo_over_sft", "> 0"),
        Target("sft_from_loop_mean", abs(apart), f"<= {LOOP_DIFFERENCE}"),
    ]


def row(seed: int, chain: Chain) -> dict[str, Any]:
    """The table's row of a seed: held-out rewards."""
    return {
        "seed": seed,
        "random weights": round(chain.sft.held_out[0], 3),
        "after the loop": round(chain.loop, 3),
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
