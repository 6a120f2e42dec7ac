"""Gleaner's arm of benchmarks.trainer, in a process of its own: the train step of tasks/learning on given responses.

It goes from recorded responses to updated weights, without journal and grading, as the other arm has no generation.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.trainer_work import (
    CLIP_RATIO_HIGH,
    CLIP_RATIO_LOW,
    GRAD_NORM_MAX,
    LEARNING_RATE,
    Meter,
    Sample,
    Work,
    keep_answers_apart,
    samples,
    work_of_arguments,
)
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import collate
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.padding import padded_tokens, passes
from tasks.learning.policy import Policy
from tasks.learning.step import accumulate, apply
from tasks.learning.totals import combined

ALGORITHM = AlgorithmConfig(clip_ratio_low=CLIP_RATIO_LOW, clip_ratio_high=CLIP_RATIO_HIGH)


def main() -> None:
    """Train as many steps as the argument says, one per line on standard input."""
    keep_answers_apart()
    torch.set_num_threads(1)
    work = work_of_arguments()
    tensors = load_file(Path(work.model_dir, "model.safetensors"))
    policy = Policy(work.model_dir, tensors, TrainerConfig(device="cpu"))
    config = OptimizerConfig(learning_rate=LEARNING_RATE, max_grad_norm=GRAD_NORM_MAX)
    optimizer = PolicyOptimizer(policy.parameters(), config)
    rows = samples(work)
    meter = Meter()
    for _ in range(work.steps):
        meter.begin()
        metrics = optimizer_step(policy, optimizer, rows, work)
        meter.end(grad_norm=metrics["actor/grad_norm"])


def optimizer_step(policy: Policy, optimizer: PolicyOptimizer, rows: list[Sample], work: Work) -> dict[str, float]:
    """Divide the responses as the trainer does, accumulate gradients and update; returns the step's metrics."""
    tokens_max = work.responses_per_pass * work.longest
    totals = []
    for batch in micro_batches(rows, work.generations, tokens_max):
        lengths = [len(rows[index].prompt) + len(rows[index].completion) for index in batch]
        for part in passes(lengths, tokens_max):
            chosen = [rows[batch[position]] for position in part]
            totals.append(
                accumulate(
                    policy,
                    collate(
                        [batch[position] for position in part],
                        [row.prompt for row in chosen],
                        [row.completion for row in chosen],
                        [[0.0] * len(row.completion) for row in chosen],
                    ),
                    torch.tensor([row.advantage for row in chosen]),
                    ALGORITHM,
                    temperature=1.0,
                    max_completion_length=work.completion_length,
                )
            )
    return apply(optimizer, combined(totals), ALGORITHM)


def micro_batches(rows: list[Sample], generations: int, tokens_max: int) -> list[list[int]]:
    """Divide into micro-batches of whole groups in order, as many as fit, as the trainer records them."""
    lengths = [len(row.prompt) + len(row.completion) for row in rows]
    found: list[list[int]] = []
    for start in range(0, len(rows), generations):
        group = list(range(start, start + generations))
        if found and padded_tokens([lengths[index] for index in found[-1] + group]) <= tokens_max:
            found[-1] += group
        else:
            found.append(group)
    return found


if __name__ == "__main__":
    main()
