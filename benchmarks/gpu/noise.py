"""The cost of keyed sampling on a device: microseconds per step of a batch, against sampling that cannot be repeated.

All arms return what an engine needs, token ids and their log-probs at temperature 1, from bfloat16 logits. On a GPU,
times are measured by the device's events, behind work that keeps it busy until the host has launched everything. The
time of a single call on an idle device, including launches, is reported beside them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own custom

from benchmarks.gpu.sizes import ModelShape, Size
from benchmarks.reporting import interleave, medians
from tasks.sampling.engines.keyed_noise import gumbel, sample

Sampler = Callable[["Logits"], tuple[Tensor, Tensor]]
COMPARED_ROWS = 32
_BUSY_WIDTH = 8192
_BUSY_PRODUCTS = 8  # about 10 ms on an H100, in which the host makes some hundred launches


@dataclass(frozen=True)
class Logits:
    """A batch as an engine passes it to its sampler: values [B, V] in bfloat16, and one of each setting per row."""

    values: Tensor
    keys: Tensor
    positions: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor

    def on_cpu(self, rows: int) -> "Logits":
        """The first rows, on the CPU."""
        return Logits(*(tensor[:rows].cpu() for tensor in vars(self).values()))


def random_logits(batch: int, vocab_size: int, device: str) -> Logits:
    """Normal logits with standard deviation 3, random keys and positions; the same at every call on a device type."""
    generator = torch.Generator(device).manual_seed(0)
    whole = partial(torch.randint, size=(batch,), generator=generator, device=device)
    return Logits(
        values=(3 * torch.randn(batch, vocab_size, generator=generator, device=device)).to(torch.bfloat16),
        keys=whole(-(1 << 62), 1 << 62),
        positions=whole(0, 4096),
        temperature=torch.ones(batch, device=device),
        top_p=torch.ones(batch, device=device),
        top_k=torch.zeros(batch, dtype=torch.int64, device=device),
    )


def keyed(logits: Logits) -> tuple[Tensor, Tensor]:
    """Sample as our engines do, on a GPU with the fused kernel if there is one."""
    return sample(
        logits.values,
        logits.keys,
        logits.positions,
        logits.temperature,
        logits.top_p,
        logits.top_k,
        truncated=False,
        greedy=False,
    )


def keyed_unfused(logits: Logits) -> tuple[Tensor, Tensor]:
    """Sample with the same noise by tensor operations alone."""
    logprobs = _logprobs(logits)
    noise = gumbel(logits.keys, logits.positions, logprobs.shape[1])
    return _picked(logprobs, noise.add_(logprobs).argmax(dim=-1))


def exponential(logits: Logits) -> tuple[Tensor, Tensor]:
    """Sample as vLLM does without seeds: the token with the largest probability / exponential noise."""
    logprobs = _logprobs(logits)
    return _picked(logprobs, logprobs.exp().div_(torch.empty_like(logprobs).exponential_()).argmax(dim=-1))


def multinomial(logits: Logits) -> tuple[Tensor, Tensor]:
    """Sample as transformers does."""
    logprobs = _logprobs(logits)
    return _picked(logprobs, torch.multinomial(logprobs.exp(), 1).squeeze(1))


SAMPLERS: dict[str, Sampler] = {
    "keyed": keyed,
    "keyed_unfused": keyed_unfused,
    "exponential": exponential,
    "multinomial": multinomial,
}


@torch.inference_mode()
def measure(size: Size) -> dict[str, Any]:
    """The figures of every batch size, and on a GPU whether keyed sampling was one pass over the logits (`fused`)."""
    batches = [_measure_batch(size, batch) for batch in size.batches]
    return {"vocab_size": size.shape.vocab_size, "batches": batches}


def _measure_batch(size: Size, batch: int) -> dict[str, Any]:
    logits = random_logits(batch, size.shape.vocab_size, size.device)
    busy = _busy_device() if size.device == "cuda" else None
    samplers: dict[str, Callable[[], object]] = {name: partial(one, logits) for name, one in SAMPLERS.items()}
    work = samplers | {"products": _replayed(decode_products(size.shape, batch, size.device), size.device)}
    arms = {name: partial(step_time, one, size.steps, busy) for name, one in work.items()}
    interleave(arms, 2)  # compiles and checks kernels, and fills caches
    found: dict[str, Any] = {
        "batch": batch,
        "step_us": medians(interleave(arms, size.rounds)),
        "call_us": medians(interleave({name: partial(call_time, one, size) for name, one in work.items()}, size.steps)),
    }
    step_us = found["step_us"]
    found["keyed_share"] = step_us["keyed"] / (step_us["keyed"] + step_us["products"])
    if size.device == "cuda":
        found["scratch_bytes"] = {name: scratch_bytes(one) for name, one in samplers.items()}
        # Otherwise the scratch memory would hold a matrix of float32 scores.
        found["fused"] = found["scratch_bytes"]["keyed"] < 4 * logits.values.numel()
    return found | agreement(logits)


def agreement(logits: Logits) -> dict[str, float]:
    """For up to 32 rows, the share in which the CPU draws the same token, and the largest log-prob difference."""
    token_ids, logprobs = (tensor[:COMPARED_ROWS].cpu() for tensor in keyed(logits))
    expected_ids, expected = keyed(logits.on_cpu(COMPARED_ROWS))
    same = token_ids == expected_ids
    return {
        "tokens_equal_to_cpu": same.double().mean().item(),
        "logprob_difference_max": (logprobs - expected)[same].abs().max().item() if bool(same.any()) else torch.inf,
    }


def step_time(work: Callable[[], object], steps: int, busy: Callable[[], object] | None) -> float:
    """Microseconds per call of `work`, many in a row; with `busy`, by the device's clock behind the work of `busy`."""
    if busy is None:
        return _host_time(work, steps)
    start, end = _event(), _event()
    busy()
    start.record()
    for _ in range(steps):
        work()
    end.record()
    end.synchronize()
    return float(1e3 * start.elapsed_time(end) / steps)


def scratch_bytes(work: Callable[[], object]) -> int:
    """The peak bytes of GPU memory that tensors take during a call, without those that existed before."""
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before_bytes


def call_time(work: Callable[[], object], size: Size) -> float:
    """Microseconds of a single call on an idle device, until its result is there."""

    def awaited() -> None:
        work()
        if size.device == "cuda":
            torch.cuda.synchronize()

    return _host_time(awaited, 1)


def decode_products(shape: ModelShape, batch: int, device: str) -> Callable[[], None]:
    """All matrix products of one decode step in bfloat16, each with its own weights: the least work of a step."""

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

    weights = [random(*product) for product in [*shape.products * shape.layers, (shape.vocab_size, shape.hidden)]]
    inputs = {width: random(batch, width) for width in {weight.shape[1] for weight in weights}}

    def run() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    return run


def _logprobs(logits: Logits) -> Tensor:
    return torch.log_softmax(logits.values.float() / logits.temperature.unsqueeze(1), dim=-1)


def _picked(logprobs: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    return token_ids, logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)


def _replayed(work: Callable[[], None], device: str) -> Callable[[], None]:
    """Record `work` as a CUDA graph on a GPU, so that its hundreds of launches cost nothing."""
    if device != "cuda":
        return work
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay(_keeps_weights: Callable[[], None] = work) -> None:
        graph.replay()

    return replay


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _busy_device() -> Callable[[], None]:
    matrix = torch.zeros(_BUSY_WIDTH, _BUSY_WIDTH, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(matrix)

    def start() -> None:
        for _ in range(_BUSY_PRODUCTS):
            torch.mm(matrix, matrix, out=product)

    return start


def _host_time(work: Callable[[], object], steps: int) -> float:
    began_s = time.perf_counter()
    for _ in range(steps):
        work()
    return 1e6 * (time.perf_counter() - began_s) / steps
