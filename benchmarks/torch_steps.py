"""What the torch engine's kernels give: tokens per second with masks, with lengths on the device, and recorded.

Run: python -m benchmarks.torch_steps --json, on a GPU. All arms decode the same responses of a random model of a
published shape in bfloat16, one arm after another. `--device cpu --small` tries the code: products take the place of
flash attention there, nothing is recorded, and the figures mean nothing but the number of operators.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.model import peaked_model
from benchmarks.gpu.sizes import SHAPES, SMALL_SHAPE, ModelShape
from benchmarks.reporting import Target, finish
from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from storage.weights.tensor_sets import TensorBlock
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.kernels import Kernels, kernels_for
from tasks.sampling.engines.row_attention import plain
from tasks.sampling.engines.torch_engine import TorchEngine

GROUP_SIZE = 8
ROUNDS = 3
Device = Literal["cpu", "cuda"]
# The first steps of a size are run and recorded; all others are alike.
_WARM_STEPS = 3


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """Counts the operators that are run one by one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operator(*args, **(kwargs or {}))


def requests(responses: int, prompt_tokens: int, tokens: int) -> list[GenerationRequest]:
    """Groups of GROUP_SIZE responses, each with a prompt of its own."""
    sampling = SamplingParams(max_completion_length=tokens)
    return [
        GenerationRequest(
            index,
            index // GROUP_SIZE,
            tuple((7 * (index // GROUP_SIZE) + 5 * place) % 900 + 50 for place in range(prompt_tokens)),
            (),
            noise_key(0, 0, index),
            sampling,
        )
        for index in range(responses)
    ]


def arms(shape: ModelShape, device: Device) -> dict[str, Kernels]:
    """The kernels of each arm; those that the device does not have are left out."""
    masks = {"masks": Kernels()}
    if device == "cpu":
        return masks | {"lengths": Kernels(plain)}
    heads = (shape.heads, shape.key_value_heads, shape.head_width)
    found = kernels_for(heads, torch.bfloat16, torch.device(device))
    if found.attention is None:
        return masks
    return masks | {"lengths": Kernels(found.attention), "recorded": found}


def measure_arm(engine: TorchEngine, responses: int, prompt_tokens: int, tokens: int) -> dict[str, Any]:
    """Seconds of prefill, tokens per second and operators of a step, and the tokens of each response."""
    items = requests(responses, prompt_tokens, tokens)
    rates, starts = [], []
    found: dict[int, list[int]] = {}
    for _ in range(1 + ROUNDS):
        found = {item.response: [] for item in items}
        began_s = time.perf_counter()
        engine.start(items)
        for _ in range(_WARM_STEPS):
            _step(engine, found)
        warm_s = time.perf_counter()
        while _step(engine, found):
            pass
        starts.append(warm_s - began_s)
        rates.append(responses * (tokens - _WARM_STEPS) / (time.perf_counter() - warm_s))
    engine.start(items)
    for _ in range(_WARM_STEPS):
        engine.step()
    with Operators() as operators:
        engine.step()
    engine.abort(range(responses))
    return {
        "start_s": statistics.median(starts[1:]),
        "tokens_per_s": statistics.median(rates[1:]),
        "operators_per_step": operators.count,
        "token_ids": [found[item.response] for item in items],
    }


def _step(engine: TorchEngine, found: dict[int, list[int]]) -> bool:
    deltas = engine.step()
    for delta in deltas:
        found[delta.response] += delta.token_ids
    return bool(deltas)


def measure(
    shape: ModelShape, device: Device, responses: int, prompt_tokens: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """A row for each arm, the first one's tokens being what the others' are compared with."""
    with tempfile.TemporaryDirectory() as folder:
        weights = peaked_model(shape, Path(folder), device)
        wanted: list[list[int]] | None = None
        for name, kernels in arms(shape, device).items():
            engine = _engine(Path(folder), weights, device, responses, prompt_tokens + tokens, kernels)
            try:
                row = measure_arm(engine, responses, prompt_tokens, tokens)
            finally:
                engine.close()
            token_ids = row.pop("token_ids")
            wanted = token_ids if wanted is None else wanted
            same = statistics.mean(a == b for a, b in zip(token_ids, wanted, strict=True))
            yield {"arm": name, "responses": responses, **row, "identical_to_masks": same}


def _engine(
    folder: Path,
    weights: Mapping[str, TensorBlock],
    device: Device,
    responses: int,
    context_length: int,
    kernels: Kernels,
) -> TorchEngine:
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if device == "cuda" else "float32"
    engine = TorchEngine(
        folder,
        dtype=dtype,
        device=device,
        kernels=kernels,
        max_responses_in_flight=responses,
        context_length=context_length,
    )
    engine.load_weights(0, weights)
    return engine


def main() -> None:
    """Parse, measure each arm, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=SHAPES, default="0.5b", help="the shape of the random model")
    parser.add_argument("--small", action="store_true", help="tries the code; its figures mean nothing")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU; --device cpu --small tries the code without one")
    shape = SMALL_SHAPE if given.small else SHAPES[given.model]
    sizes, prompt_tokens, tokens = ((8,), 20, 16) if given.small else ((64, 256), 256, 512)
    rows = []
    for responses in sizes:
        for row in measure(shape, given.device, responses, prompt_tokens, tokens):
            rows.append(row)
            print(f"## {row}", flush=True)
    found = [
        Target(f"recorded_over_masks_{responses}", by_arm["recorded"] / by_arm["masks"], ">= 2")
        for responses in sizes
        if "recorded" in (by_arm := {row["arm"]: row["tokens_per_s"] for row in rows if row["responses"] == responses})
    ]
    notes = {"device": given.device, "model": given.model, "prompt_tokens": prompt_tokens, "tokens": tokens}
    finish("torch_steps", rows, found, as_json=given.json, notes=notes | {"small": given.small})


if __name__ == "__main__":
    main()
