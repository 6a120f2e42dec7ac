"""One optimizer step of tasks/learning on a device: tokens per second, peak memory, and a rough share of peak FLOP/s.

The step is the trainer's own code from collated responses to updated weights, without journal and grading.
"""

import gc
import importlib.util
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.model import write_model
from benchmarks.gpu.sizes import Size
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.advantage import group_advantages
from tasks.learning.batching import TokenBatch, collate
from tasks.learning.learner import Learner
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.padding import passes
from tasks.learning.policy import Policy
from tasks.learning.restoring import pack_models
from tasks.learning.step import accumulate, apply
from tasks.learning.totals import combined

# Dense bfloat16 values from the makers' data sheets; the first key that occurs in a device's name counts.
PEAK_FLOPS_PER_S = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
}
_ALGORITHM = AlgorithmConfig()


def measure(size: Size) -> dict[str, Any]:
    """The figures with and without gradient checkpointing and, on a GPU that has them, Liger's kernels.

    An arm that does not fit is reported as out of memory.
    """
    ligers = (False, True) if size.device == "cuda" and importlib.util.find_spec("liger_kernel") else (False,)
    lengths = {"prompt_tokens": size.prompt_tokens, "completion_tokens": size.completion_tokens}
    with tempfile.TemporaryDirectory() as folder:
        tensors = write_model(size.shape, Path(folder), size.device)
        arms = [
            {
                "gradient_checkpointing": on,
                "liger": liger,
                **_measure_arm(size, Path(folder), tensors, checkpointing=on, liger=liger),
            }
            for liger in ligers
            for on in (False, True)
        ]
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return {"prompts": size.prompts, "generations": size.generations, **lengths, "parameters": parameters, "arms": arms}


def _measure_arm(
    size: Size, folder: Path, tensors: Mapping[str, Tensor], *, checkpointing: bool, liger: bool
) -> dict[str, Any]:
    gc.collect()  # an arm that ran out of memory may still hold some
    if size.device == "cuda":
        torch.cuda.empty_cache()
    try:
        step_s, peak_bytes = _steps(size, folder, tensors, checkpointing=checkpointing, liger=liger)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    tokens = size.prompts * size.generations * (size.prompt_tokens + size.completion_tokens)
    flops_per_s = 6 * sum(tensor.numel() for tensor in tensors.values()) * tokens / step_s
    peak = _peak_flops_per_s() if size.device == "cuda" else None
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "peak_memory_bytes": peak_bytes,
        "model_flops_per_s": flops_per_s,
        "mfu": flops_per_s / peak if peak else None,
    }


def _steps(
    size: Size, folder: Path, tensors: Mapping[str, Tensor], *, checkpointing: bool, liger: bool
) -> tuple[float, int | None]:
    """The median seconds of an optimizer step, and the peak bytes of tensors on a GPU during all steps."""
    config = TrainerConfig(
        dtype="bfloat16",
        device="cuda" if size.device == "cuda" else "cpu",
        micro_batch_tokens_max=size.micro_batch_tokens_max,
        gradient_checkpointing=checkpointing,
        use_liger_kernel=liger,
    )
    policy = Policy(folder, tensors, config)
    optimizer = PolicyOptimizer(policy.parameters(), OptimizerConfig())
    learner = Learner(policy, optimizer, None)
    on_gpu = policy.device.type == "cuda"
    if on_gpu:
        pack_models(learner)
    batches = _batches(size, config, packed=learner.is_packed)
    optimizer_step(policy, optimizer, batches, size)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    durations_s = []
    for _ in range(size.optimizer_steps):
        began_s = time.perf_counter()
        optimizer_step(policy, optimizer, batches, size)
        if on_gpu:
            torch.cuda.synchronize()
        durations_s.append(time.perf_counter() - began_s)
    return statistics.median(durations_s), torch.cuda.max_memory_allocated() if on_gpu else None


def optimizer_step(
    policy: Policy, optimizer: PolicyOptimizer, batches: list[tuple[TokenBatch, Tensor]], size: Size
) -> dict[str, float]:
    """Accumulate all batches with their advantages and update the policy; returns the step's metrics."""
    totals = [
        accumulate(
            policy,
            batch,
            advantages,
            _ALGORITHM,
            temperature=1.0,
            max_completion_length=size.completion_tokens,
        )
        for batch, advantages in batches
    ]
    return apply(optimizer, combined(totals), _ALGORITHM)


def _batches(size: Size, config: TrainerConfig, *, packed: bool) -> list[tuple[TokenBatch, Tensor]]:
    """Random responses of equal length with random rewards, divided as the trainer divides them."""
    rng = random.Random(0)
    count = size.prompts * size.generations
    prompts = [rng.choices(range(size.shape.vocab_size), k=size.prompt_tokens) for _ in range(size.prompts)]
    rewards = torch.tensor([float(rng.random() < 0.5) for _ in range(count)], dtype=torch.float64)
    advantages = group_advantages(
        rewards, size.generations, scale_rewards=_ALGORITHM.scale_rewards, advantage_eps=_ALGORITHM.advantage_eps
    ).to(torch.float32)
    lengths = [size.prompt_tokens + size.completion_tokens] * count
    return [
        (
            collate(
                part,
                [prompts[response // size.generations] for response in part],
                [rng.choices(range(size.shape.vocab_size), k=size.completion_tokens) for _ in part],
                [[-1.0] * size.completion_tokens for _ in part],
            ),
            advantages[part],
        )
        for part in passes(lengths, config.micro_batch_tokens_max, packed=packed)
    ]


def _peak_flops_per_s() -> float | None:
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAK_FLOPS_PER_S.items() if part in name), None)
