"""Estimated decode steps beside measurements that others published; nothing here was measured by us.

Run: python -m benchmarks.step_times [--json]. STEP_S, LAYER_S and the bandwidths reached (one for the H20, one for all
others) of tasks.forecasting.engine_estimate make the greatest factor of the rows marked "fitted" as small as it gets,
1.29; SUM_S follows from 72B on four GPUs. The other rows were held back.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.reporting import Target, finish
from resources.accelerators import accelerator
from resources.model_size import ModelSize, size_from_config
from tasks.forecasting.engine_estimate import MFU, Device, bandwidth_reached, decode_step_s

FACTOR_MAX = 1.3
# hidden_size, num_hidden_layers, heads, key-value heads, head size, intermediate_size, vocab_size, tied embeddings:
# from each model's config.json.
CONFIGS = {
    "Qwen2.5-0.5B": (896, 24, 14, 2, 64, 4864, 151936, True),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 128, 8960, 151936, True),
    "Qwen2.5-3B": (2048, 36, 16, 2, 128, 11008, 151936, True),
    "Qwen2.5-7B": (3584, 28, 28, 4, 128, 18944, 152064, False),
    "Qwen2.5-14B": (5120, 48, 40, 8, 128, 13824, 152064, False),
    "Qwen2.5-32B": (5120, 64, 40, 8, 128, 27648, 152064, False),
    "Qwen2.5-72B": (8192, 80, 64, 8, 128, 29568, 152064, False),
    "Llama-3.1-8B": (4096, 32, 32, 8, 128, 14336, 128256, False),
    "Qwen3-0.6B": (1024, 28, 16, 8, 128, 3072, 151936, True),
    "Qwen3-1.7B": (2048, 28, 16, 8, 128, 6144, 151936, True),
    "Qwen3-4B": (2560, 36, 32, 8, 128, 9728, 151936, True),
    "Qwen3-8B": (4096, 36, 32, 8, 128, 12288, 151936, False),
    "Qwen3-14B": (5120, 40, 40, 8, 128, 17408, 151936, False),
    "Qwen3-32B": (5120, 64, 64, 8, 128, 25600, 151936, False),
}
FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A published table. accelerator: on which it was measured; engine: with its version; as_of: when it was published.

    output: tokens of a response, of which the mean context has half.
    """

    name: str
    accelerator: str
    engine: str
    as_of: str
    output: int


QWEN_2_5 = Source(
    name="Qwen2.5 documentation, speed benchmark",
    accelerator="A100-80GB",
    engine="vLLM 0.6.3",
    as_of="2024-11-06",
    output=2048,
)
INFERENCE_BENCH = Source(
    name="yobitelcomm.github.io/bench, concurrency sweep, median time per token",
    accelerator="H100-80GB",
    engine="vLLM 0.21.0",
    as_of="2026-05-16",
    output=250,
)
QWEN_3 = Source(
    name="Qwen3 documentation, speed benchmark",
    accelerator="H20",
    engine="SGLang 0.4.6",
    as_of="2025-05-20",
    output=2048,
)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """tokens_per_s: of one response, while `batch` are decoded together on `gpus` GPUs, each after `inputs` tokens."""

    model: str
    source: Source
    tokens_per_s: float
    gpus: int = 1
    batch: int = 1
    inputs: int = 0
    fitted: bool = False

    @property
    def estimated(self) -> float:
        """Tokens per second of one response, by the estimate that a forecast uses."""
        found = accelerator(self.source.accelerator)
        reached = bandwidth_reached(found)
        device = Device(accelerator=found, gpus=self.gpus, bandwidth_efficiency=reached, mfu=MFU)
        return 1 / decode_step_s(size(self.model), device, self.batch, self.inputs + self.source.output / 2)

    @property
    def ratio(self) -> float:
        """Estimated speed over measured speed."""
        return self.estimated / self.tokens_per_s

    def row(self) -> dict[str, Any]:
        """The row of the table."""
        return {
            "model": self.model,
            "on": f"{self.gpus} x {self.source.accelerator}",
            "batch": self.batch,
            "input": self.inputs,
            "measured": self.tokens_per_s,
            "estimated": round(self.estimated, 1),
            "ratio": round(self.ratio, 2),
            "used": "fitted" if self.fitted else "held back",
            "source": f"{self.source.name}, {self.source.as_of}, {self.source.engine}",
        }


def _by_model(source: Source, found: Mapping[str, float], **given: Any) -> tuple[Measurement, ...]:
    return tuple(Measurement(model=model, source=source, tokens_per_s=rate, **given) for model, rate in found.items())


MEASUREMENTS = (
    *_by_model(
        QWEN_2_5,
        {"Qwen2.5-0.5B": 311.55, "Qwen2.5-1.5B": 183.33, "Qwen2.5-3B": 127.61, "Qwen2.5-7B": 84.28},
        fitted=True,
    ),
    *_by_model(QWEN_2_5, {"Qwen2.5-14B": 46.30, "Qwen2.5-32B": 22.13}),
    *_by_model(QWEN_2_5, {"Qwen2.5-72B": 18.19}, gpus=2),
    *_by_model(QWEN_2_5, {"Qwen2.5-72B": 31.37}, gpus=4, fitted=True),
    *_by_model(QWEN_2_5, {"Qwen2.5-0.5B": 264.51, "Qwen2.5-7B": 70.33, "Qwen2.5-14B": 37.18}, inputs=30720),
    *_by_model(QWEN_2_5, {"Qwen2.5-32B": 31.82}, gpus=2, inputs=30720),
    *_by_model(QWEN_2_5, {"Qwen2.5-72B": 27.53}, gpus=4, inputs=30720),
    *_by_model(INFERENCE_BENCH, {"Llama-3.1-8B": round(1000 / 6.48, 1)}, fitted=True),
    *_by_model(INFERENCE_BENCH, {"Llama-3.1-8B": round(1000 / 6.59, 1)}, batch=4),
    *_by_model(INFERENCE_BENCH, {"Llama-3.1-8B": round(1000 / 10.94, 1)}, batch=16, fitted=True),
    *_by_model(QWEN_3, {"Qwen3-0.6B": 414.17, "Qwen3-8B": 81.73}, fitted=True),
    *_by_model(QWEN_3, {"Qwen3-1.7B": 227.80, "Qwen3-4B": 133.13, "Qwen3-14B": 47.10, "Qwen3-32B": 20.72}),
)


@cache
def size(model: str) -> ModelSize:
    """The size of a model of the table, in bfloat16."""
    return size_from_config(dict(zip(FIELDS, CONFIGS[model], strict=True)), weight_bytes=2)


def worst(found: tuple[Measurement, ...]) -> float:
    """The greatest factor between an estimate and its measurement, in either direction."""
    return max(max(one.ratio, 1 / one.ratio) for one in found)


def targets() -> list[Target]:
    """One bound for the rows of each source."""
    found = []
    for source in (QWEN_2_5, INFERENCE_BENCH, QWEN_3):
        rows = tuple(one for one in MEASUREMENTS if one.source == source)
        name = f"{source.accelerator}, {source.engine}: greatest factor of {len(rows)} rows"
        found.append(Target(name, round(worst(rows), 3), f"<= {FACTOR_MAX}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    finish("step_times", [one.row() for one in MEASUREMENTS], targets(), as_json=options.json, notes={})


if __name__ == "__main__":
    main()
