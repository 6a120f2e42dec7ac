"""The head's time per token by the logits of a chunk: log-probs and their gradient, without the layers before it."""

import gc
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.sizes import Size
from benchmarks.reporting import interleave, medians
from tasks.learning.token_logprobs import gpu_logits
from tasks.learning.token_objective import token_objective


def measure(size: Size) -> dict[str, Any]:
    """Microseconds per token by hidden size and chunk, the fastest chunk, and the chunk that the trainer takes."""
    chosen = None
    if size.device == "cuda":
        chosen = gpu_logits(torch.cuda.get_device_properties(0).total_memory)
    return {
        "tokens": size.head_tokens,
        "chosen": chosen,
        "arms": [_of_width(size, hidden) for hidden in size.head_hidden],
    }


def _of_width(size: Size, hidden: int) -> dict[str, Any]:
    gc.collect()
    generator = torch.Generator(size.device).manual_seed(0)
    dtype = torch.bfloat16 if size.device == "cuda" else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=size.device, dtype=dtype).requires_grad_()

    states, weight = random(size.head_tokens, hidden), random(size.shape.vocab_size, hidden)
    targets = torch.randint(size.shape.vocab_size, (size.head_tokens,), generator=generator, device=size.device)
    arms = {str(chunk): partial(_seconds, states, weight, targets, chunk) for chunk in size.head_chunks}
    interleave(arms, 1)
    per_token = {
        chunk: 1e6 * seconds / size.head_tokens
        for chunk, seconds in medians(interleave(arms, size.head_rounds)).items()
    }
    return {
        "hidden": hidden,
        "us_per_token": per_token,
        "fastest": int(min(per_token, key=lambda chunk: per_token[chunk])),
    }


def _seconds(states: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> float:
    """Seconds of one value with its gradient."""
    began_s = time.perf_counter()
    objective, _, _ = token_objective(
        states, weight, None, targets, lambda logprobs, _: -logprobs, logits_per_chunk=chunk
    )
    objective.backward()  # type: ignore[no-untyped-call]
    if states.device.type == "cuda":
        torch.cuda.synchronize()
    states.grad = weight.grad = None
    return time.perf_counter() - began_s
