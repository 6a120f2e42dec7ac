"""One optimizer step of tasks/learning on a device beside TRL's: tokens per second, peak memory, share of peak FLOP/s.

The step is the trainer's own code from collated responses to updated weights, without journal and grading; TRL's step
gets the same responses. The arms run one after another, each with the memory of the device to itself.
"""

import gc
import importlib.util
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.arm import Arm, ArmError
from benchmarks.gpu.model import write_model
from benchmarks.gpu.sizes import Size
from benchmarks.gpu.waits import waits
from benchmarks.trainer_work import Work
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.advantage import group_advantages
from tasks.learning.batching import TokenBatch, collate
from tasks.learning.faster_passes import make_faster, pack_models
from tasks.learning.learner import Learner
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.padding import SharedPrompt, padded_tokens, passes
from tasks.learning.policy import Policy
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
# A Python that has trl, where that is not this one.
TRL_PYTHON = "GLEANER_TRL_PYTHON"
_TRL_PER_PASS = (16, 8)
_TRL_LIMIT_S = 60.0
_SPREAD = 0.9  # of the logarithms of lengths, as in rollouts


def measure(size: Size) -> Iterator[dict[str, Any]]:
    """The figures of each arm by padded share: with and without Liger's kernels and packing, and TRL's.

    An arm that does not fit is reported as out of memory. TRL's peak is that of the most responses in a pass that fit.
    """
    ligers = (False, True) if size.device == "cuda" and importlib.util.find_spec("liger_kernel") else (False,)
    count = size.prompts * size.generations
    arms: list[dict[str, Any]] = []
    found: dict[str, Any] = {"prompts": size.prompts, "generations": size.generations, "arms": arms}
    with tempfile.TemporaryDirectory() as folder:
        tensors = write_model(size.shape, Path(folder), size.device)
        found["parameters"] = sum(tensor.numel() for tensor in tensors.values())
        theirs = _Theirs(size, folder)
        try:
            for share in size.padded_shares:
                lengths = completion_lengths(count, size.prompt_tokens, size.completion_tokens, share)
                tokens = count * size.prompt_tokens + sum(lengths)
                for liger in ligers:
                    for packed in (True, False):
                        common = {"padded_share": share, "liger": liger, "gradient_checkpointing": False}
                        given = _Given(size, Path(folder), tensors, lengths)
                        arm = given.measured(liger=liger, packed=packed)
                        arms.append({"trainer": "ours", **common, **_rates(arm, tokens, found["parameters"])})
                        yield found
                    arm = theirs.measured(lengths, liger=liger)
                    arms.append({"trainer": "trl", **common, **_rates(arm, tokens, found["parameters"])})
                    yield found
            for checkpointing, shares in ((False, False), (True, True)):
                given = _Given(size, Path(folder), tensors, lengths)
                arm = given.measured(liger=ligers[-1], packed=True, checkpointing=checkpointing, shares=shares)
                common = {"padded_share": share, "liger": ligers[-1], "gradient_checkpointing": checkpointing}
                arms.append({"trainer": "ours", **common, **_rates(arm, tokens, found["parameters"])})
                yield found
        finally:
            theirs.close()


def completion_lengths(count: int, prompt: int, most: int, padded_share: float) -> list[int]:
    """Lengths of completions, at most `most`, that in one batch have this share of padding, as nearly as can be.

    0: all have the most. Else they are quantiles of a log-normal distribution, cut as in rollouts, in a fixed order.
    """
    if not padded_share:
        return [most] * count
    quantiles = [statistics.NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)]

    def scaled(scale: float) -> list[int]:
        found = [max(1, min(most, round(scale * math.exp(_SPREAD * quantile)))) for quantile in quantiles]
        return [*found[:-1], most]

    wanted = (1 - padded_share) * count * (prompt + most) - count * prompt
    low, high = 0.0, 1e3 * most
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(scaled(middle)) < wanted else (low, middle)
    lengths = scaled(high)
    random.Random(0).shuffle(lengths)
    return lengths


def _rates(arm: Mapping[str, Any], tokens: int, parameters: int) -> dict[str, Any]:
    """The figures of an arm with `step_s`; padding counts as no token, and arithmetic has shared prompts once."""
    if "step_s" not in arm:
        return dict(arm)
    flops_per_s = 6 * parameters * (tokens - arm.get("shared_tokens", 0)) / arm["step_s"]
    peak = _peak_flops_per_s() if torch.cuda.is_available() else None
    mfu = flops_per_s / peak if peak else None
    return {**arm, "tokens_per_s": tokens / arm["step_s"], "model_flops_per_s": flops_per_s, "mfu": mfu}


class _Theirs:
    """TRL's trainer in a process of its own; what it cannot measure it gives a reason for."""

    def __init__(self, size: Size, folder: str) -> None:
        self._size, self._folder = size, folder
        self._why: str | None = None
        self._arm: Arm | None = None
        python = os.environ.get(TRL_PYTHON, sys.executable)
        if python == sys.executable and importlib.util.find_spec("trl") is None:
            self._why = f"trl is not installed; {TRL_PYTHON} may name a Python that has it"
        else:
            self._arm = Arm("benchmarks.gpu.trainer_trl", {}, python)

    def measured(self, lengths: Sequence[int], *, liger: bool) -> dict[str, Any]:
        """The figures of the fastest arm among the numbers of responses in a pass; or a reason."""
        found: list[dict[str, Any]] = []
        for per_pass in _TRL_PER_PASS if self._size.device == "cuda" else (self._size.generations,):
            answer = self._answer(lengths, per_pass, liger=liger)
            found.append(answer | {"responses_per_pass": per_pass})
            if "step_s" in answer:
                break
        return min(found, key=lambda arm: arm.get("step_s", math.inf))

    def _answer(self, lengths: Sequence[int], per_pass: int, *, liger: bool) -> dict[str, Any]:
        size = self._size
        work = Work(
            model_dir=self._folder,
            vocab_size=size.shape.vocab_size,
            completion_length=size.completion_tokens,
            prompts=size.prompts,
            generations=size.generations,
            prompt_length=size.prompt_tokens,
            responses_per_pass=per_pass,
            steps=1 + size.optimizer_steps,
        )
        asked = {
            "work": asdict(work),
            "lengths": lengths,
            "on_gpu": size.device == "cuda",
            "settings": {"use_liger_kernel": liger},
        }
        if self._arm is None:
            return {"skipped": self._why}
        try:
            if self._why is None:
                self._why = str(self._arm.answer(_TRL_LIMIT_S)["trl"])
            return {"trl": self._why, **self._arm.ask(asked, _TRL_LIMIT_S)}
        except ArmError as error:
            self.close()
            self._why = str(error)
            return {"skipped": self._why}

    def close(self) -> None:
        arm, self._arm = self._arm, None
        if arm is not None:
            arm.close()


class _Given:
    """What an arm of ours gets: the model, and responses of these lengths."""

    def __init__(self, size: Size, folder: Path, tensors: Mapping[str, Tensor], lengths: Sequence[int]) -> None:
        self._size, self._folder, self._tensors, self._lengths = size, folder, tensors, lengths

    def measured(
        self, *, liger: bool, packed: bool, checkpointing: bool = False, shares: bool = True
    ) -> dict[str, Any]:
        """Seconds of a step, peak bytes of tensors on a GPU, the share of padding, and `waits`; or out of memory.

        shares: Whether packed passes have a prompt once for the responses to it, as in the trainer.
        """
        config = TrainerConfig(
            dtype="bfloat16",
            device="cuda" if self._size.device == "cuda" else "cpu",
            micro_batch_tokens_max=self._size.micro_batch_tokens_max,
            gradient_checkpointing=checkpointing,
            use_liger_kernel=liger,
        )
        try:
            return self._steps(config, packed=packed, shares=shares)
        except torch.OutOfMemoryError as error:
            return {"packed": packed, "out_of_memory": str(error).splitlines()[0]}
        finally:
            # For TRL's process, which runs next.
            gc.collect()
            if self._size.device == "cuda":
                torch.cuda.empty_cache()

    def _steps(self, config: TrainerConfig, *, packed: bool, shares: bool) -> dict[str, Any]:
        size = self._size
        policy = Policy(self._folder, self._tensors, config)
        optimizer = PolicyOptimizer(policy.parameters(), OptimizerConfig())
        learner = Learner(policy, optimizer, None)
        on_gpu = policy.device.type == "cuda"
        make_faster(learner, config)
        if not packed:
            policy.module.set_attn_implementation("sdpa")
        elif not learner.is_packed:  # as on a CPU
            pack_models(learner)
        batches, padding = self._batches(config, packed=learner.is_packed)
        shared = sum(batch.repeated_tokens for batch, _ in batches) if learner.is_packed and shares else 0
        if not shares:
            alone = [replace(batch, same_prompts=tuple(range(len(batch.responses)))) for batch, _ in batches]
            batches = [(batch, advantages) for batch, (_, advantages) in zip(alone, batches, strict=True)]
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
        peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else None
        waiting = waits(lambda: optimizer_step(policy, optimizer, batches, size))
        return {
            "packed": learner.is_packed,
            "step_s": statistics.median(durations_s),
            "peak_memory_bytes": peak_bytes,
            "padding_share": padding,
            "shared_tokens": shared,
            "waits": waiting | {"passes": len(batches)},
        }

    def _batches(self, config: TrainerConfig, *, packed: bool) -> tuple[list[tuple[TokenBatch, Tensor]], float]:
        """Random responses with random rewards, divided as the trainer divides them, and their share of padding."""
        rng, size = random.Random(0), self._size
        count = len(self._lengths)
        prompts = [rng.choices(range(size.shape.vocab_size), k=size.prompt_tokens) for _ in range(size.prompts)]
        said = [rng.choices(range(size.shape.vocab_size), k=length) for length in self._lengths]
        rewards = torch.tensor([float(rng.random() < 0.5) for _ in range(count)], dtype=torch.float64)
        advantages = group_advantages(
            rewards, size.generations, scale_rewards=_ALGORITHM.scale_rewards, advantage_eps=_ALGORITHM.advantage_eps
        ).to(torch.float32)
        lengths = [size.prompt_tokens + length for length in self._lengths]
        shared = [SharedPrompt(response // size.generations, size.prompt_tokens - 1) for response in range(count)]
        parts = passes(lengths, config.micro_batch_tokens_max, packed=packed, prompts=shared)
        padded = sum(padded_tokens([lengths[response] for response in part]) for part in parts)
        batches = [
            (
                collate(
                    part,
                    [prompts[response // size.generations] for response in part],
                    [said[response] for response in part],
                    [[-1.0] * self._lengths[response] for response in part],
                ),
                advantages[part],
            )
            for part in parts
        ]
        return batches, 0.0 if packed else 1 - sum(lengths) / padded


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


def _peak_flops_per_s() -> float | None:
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAK_FLOPS_PER_S.items() if part in name), None)
