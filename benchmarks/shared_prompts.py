"""What it gives to compute a prompt that a group shares once: packed steps with and without it.

Run: python -m benchmarks.shared_prompts --json (3 min). Forward and backward passes of a random model in float32 on one
thread of a CPU, in processor time. A GPU's arms are in `python -m benchmarks.gpu --part trainer`.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.reporting import Measured, Target, finish, interleave, ratios
from benchmarks.weight_steps import make_random_policy
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import TokenBatch, collate
from tasks.learning.packing import pack
from tasks.learning.policy import Policy
from tasks.learning.pretrained import read_tensors
from tasks.learning.step import accumulate
from tasks.sampling.engines.weight_tensors import as_torch

# Prompt and response tokens of a group of GENERATIONS.
LENGTHS = ((64, 512), (256, 768), (128, 256), (64, 64), (256, 256), (512, 128))
GENERATIONS, HIDDEN, LAYERS, ROUNDS = 8, 256, 6, 6
# A smaller gain would not be worth a mechanism; a group of this kind saves a quarter of its tokens or more.
WORTH, SHARE_MIN = 1.1, 0.25


def group(prompt_tokens: int, response_tokens: int, vocabulary: int) -> TokenBatch:
    """A group of random responses to one prompt."""
    rng = random.Random(0)
    prompt = rng.choices(range(vocabulary), k=prompt_tokens)
    said = [rng.choices(range(vocabulary), k=response_tokens) for _ in range(GENERATIONS)]
    return collate(range(GENERATIONS), [prompt] * GENERATIONS, said, [[-1.0] * response_tokens] * GENERATIONS)


def speed(policy: Policy, batch: TokenBatch, rounds: int) -> Measured:
    """The time of a step with the prompt computed for each response over the time with the prompt computed once."""

    def arm(given: TokenBatch) -> Callable[[], float]:
        def step() -> float:
            began_s = time.process_time()
            longest = max(given.trained_lengths)
            accumulate(
                policy,
                given,
                torch.ones(GENERATIONS),
                AlgorithmConfig(),
                temperature=1.0,
                max_completion_length=longest,
            )
            policy.drop_gradient()
            return time.process_time() - began_s

        return step

    arms = {"own": arm(replace(batch, same_prompts=tuple(range(GENERATIONS)))), "shared": arm(batch)}
    for warm in arms.values():
        warm()
    found = interleave(arms, rounds)
    return ratios(found["own"], found["shared"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_random_policy(Path(folder), hidden=HIDDEN, layers=LAYERS)
        tensors = {name: as_torch(block) for name, block in read_tensors(model).items()}
        policy = Policy(model, tensors, TrainerConfig(device="cpu"))
    pack(policy.module)
    for prompt_tokens, response_tokens in LENGTHS:
        batch = group(prompt_tokens, response_tokens, policy.module.config.vocab_size)
        rows.append(
            {
                "prompt tokens": prompt_tokens,
                "response tokens": response_tokens,
                "tokens left out": batch.repeated_tokens / sum(batch.total_lengths),
                "times as fast": speed(policy, batch, given.rounds),
            }
        )
    least = min(
        (row for row in rows if row["tokens left out"] >= SHARE_MIN), key=lambda row: row["times as fast"].median
    )
    targets: list[Target] = [least["times as fast"].target(f"from {SHARE_MIN} of the tokens on", f">= {WORTH}")]
    finish("shared_prompts", rows, targets, as_json=given.json, notes={"rounds": given.rounds})


if __name__ == "__main__":
    main()
