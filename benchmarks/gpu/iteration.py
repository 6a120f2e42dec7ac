"""One whole iteration on this machine by production's code: plan, rollout by one member, training, conclusion."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.model import CONTEXT_LENGTH_MAX, write_model
from benchmarks.gpu.sizes import Size
from examples.warm_start import build_tokenizer
from storage.clock import SystemClock
from storage.connect import connect
from storage.run import read_plan
from tasks.configuration.run_config import RunConfig, parse
from tasks.learning.advance import advance
from tasks.preparing.iteration import prepare
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.engines.vllm_names import installed_version
from tasks.sampling.session.member import generate_slot

_EXECUTION = "benchmark"
_USD_PER_H = {"rollout": 0.0, "train": 0.0}
# The metrics of the report that say most about how well the machine was used.
_METRICS = ("num_tokens", "timing_s/update", "importance/ratio_min", "importance/ratio_max", "importance/ess")


def measure(size: Size) -> dict[str, Any]:
    """Seconds of each task, one after another, and some metrics of the iteration's report."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        write_model(size.shape, model, size.device)
        build_tokenizer().save_pretrained(model)
        config, clock = settings(size, model, f"{folder}/run"), SystemClock()
        seconds: dict[str, float] = {}
        reference, _ = _timed(seconds, "plan", lambda: prepare(config, _EXECUTION, clock))
        url, iteration = reference.run_url, reference.iteration
        slots = [place.slot for place in read_plan(connect(url), iteration).slots]
        _timed(
            seconds, "rollout", lambda: [generate_slot(url, iteration, slot, lambda: False, clock) for slot in slots]
        )
        _timed(seconds, "train", lambda: advance(url, iteration, _EXECUTION, clock))
        report = _timed(seconds, "conclude", lambda: conclude_iteration(connect(url), iteration, _USD_PER_H, clock))
    metrics = {name: report.metrics[name] for name in _METRICS if name in report.metrics}
    return {"engine": config.rollout.engine, "seconds": seconds, "metrics": metrics}


def settings(size: Size, model: Path, url: str) -> RunConfig:
    """The configuration of the iteration; vLLM generates where it is installed, except on a CPU."""
    on_gpu = size.device == "cuda"
    dtype = "bfloat16" if on_gpu else "float32"
    return parse(
        {
            "run": {"url": url, "num_prompts_per_step": size.iteration_prompts, "num_generations": 8},
            "policy": {"path": str(model)},
            "data": {"source": "arithmetic", "size": size.iteration_prompts},
            "rewards": [{"function": "arithmetic"}],
            "sampling": {"max_completion_length": size.iteration_tokens},
            "rollout": {
                "engine": "vllm" if on_gpu and installed_version() is not None else "torch",
                "dtype": dtype,
                "context_length": min(CONTEXT_LENGTH_MAX, size.iteration_tokens + 128),
                "max_responses_in_flight": size.responses,
                "idle_timeout_s": 0.0,
            },
            "trainer": {"dtype": dtype, "gradient_checkpointing": on_gpu},
            "pools": {"rollout": {"count": 1, "gpus": int(on_gpu)}, "train": {"gpus": int(on_gpu)}},
        }
    )


def _timed(seconds: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
    began_s = time.perf_counter()
    result = work()
    seconds[name] = time.perf_counter() - began_s
    return result
