"""TRL's optimizer step on given responses, in a process of its own; see benchmarks.trainer_trl.

Each line of input is an arm: its work and lengths; the answer is its step's seconds and peak memory. It needs no
requirement of ours, because TRL may have an environment of its own.
"""

import gc
import importlib
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.trainer_trl import grpo_trainer
from benchmarks.trainer_work import Sample, Work, answer, keep_answers_apart


def main() -> None:
    """Say which release this is, and measure an arm for each line."""
    keep_answers_apart()
    warnings.simplefilter("ignore")
    answer({"trl": str(importlib.import_module("trl").__version__)})
    for line in sys.stdin:
        answer(_measured(**json.loads(line)))


def _measured(
    work: dict[str, Any], lengths: Sequence[int], *, on_gpu: bool, settings: dict[str, Any]
) -> dict[str, Any]:
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        return {
            "step_s": _step_s(Work(**work), lengths, on_gpu=on_gpu, settings=settings),
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        }
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    finally:
        # For the trainer of ours, in another process, which runs next.
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def _step_s(work: Work, lengths: Sequence[int], *, on_gpu: bool, settings: dict[str, Any]) -> float:
    """The median seconds of a step; the first one is not timed."""
    rng = random.Random(0)

    def draw(length: int) -> list[int]:
        return rng.choices(range(3, work.vocab_size), k=length)

    prompts = [draw(work.prompt_length) for _ in range(work.prompts)]
    rows = [
        Sample(prompts[index // work.generations], draw(length), rng.gauss(0, 1))
        for index, length in enumerate(lengths)
    ]
    spent: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        grpo_trainer(
            work, rows, folder, _watch(spent, on_gpu=on_gpu), use_cpu=not on_gpu, bf16=True, **settings
        ).train()
    return statistics.median(spent[1:])


def _watch(spent: list[float], *, on_gpu: bool) -> Any:
    transformers = importlib.import_module("transformers")

    class Watch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began_s = _now_s(on_gpu=on_gpu)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            spent.append(_now_s(on_gpu=on_gpu) - self.began_s)

    return Watch()


def _now_s(*, on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
