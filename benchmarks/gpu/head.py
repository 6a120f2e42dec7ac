"""The head's time per token and its memory, without the layers before it: log-probs, a loss of them, and its gradient.

By the logits of a chunk, and by the way: computed once as the trainer does, once for whole responses, twice as it would
be through autograd, and by Liger's fused losses where they are installed. Matrix products take 6NVH operations where
logits are computed once, else 8NVH; what differs besides is how often a chunk is read and written.
"""

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.sizes import Size
from benchmarks.live_bytes import LiveBytes
from tasks.learning.token_logprobs import gpu_logits, token_logprobs
from tasks.learning.token_objective import token_objective

_RESPONSES = 8


def measure(size: Size) -> Iterator[dict[str, Any]]:
    """Microseconds per token by hidden size and chunk, then by way with its peak memory; all so far, after each arm."""
    chosen = None
    if size.device == "cuda":
        chosen = gpu_logits(torch.cuda.get_device_properties(0).total_memory)
    arms: list[dict[str, Any]] = []
    found = {"tokens": size.head_tokens, "chosen": chosen, "arms": arms}
    for hidden in size.head_hidden:
        arm: dict[str, Any] = {"hidden": hidden, "us_per_token": {}, "ways": {}}
        arms.append(arm)
        given = _Given(size, hidden)
        for chunk in size.head_chunks:
            arm["us_per_token"][str(chunk)] = given.us_per_token(partial(given.once, chunk))
            yield found
        arm["fastest"] = int(min(arm["us_per_token"], key=lambda chunk: arm["us_per_token"][chunk]))
        for name, way in given.ways(chosen or arm["fastest"]).items():
            arm["ways"][name] = given.tried(way)
            yield found


class _Given:
    """Random states, head and targets, and the ways to go through them."""

    def __init__(self, size: Size, hidden: int) -> None:
        gc.collect()
        self._size = size
        generator = torch.Generator(size.device).manual_seed(0)
        dtype = torch.bfloat16 if size.device == "cuda" else torch.float32

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=size.device, dtype=dtype)

        vocab_size = size.shape.vocab_size
        self._states = random(size.head_tokens, hidden).requires_grad_()
        self._weight = (random(vocab_size, hidden) / hidden**0.5).requires_grad_()
        self._targets = torch.randint(vocab_size, (size.head_tokens,), generator=generator, device=size.device)
        self._advantages = random(_RESPONSES).float()
        self._width = size.head_tokens // _RESPONSES

    def ways(self, chunk: int) -> dict[str, Callable[[], None]]:
        """Each way with chunks of so many logits; Liger chooses its own."""
        return {
            "once": partial(self.once, chunk),
            "once, whole responses": partial(self.once, chunk, together=True),
            "twice": partial(self._twice, chunk),
            "Liger's GRPO loss": self._liger_grpo,
            "Liger's cross-entropy": self._liger_cross_entropy,
        }

    def tried(self, way: Callable[[], None]) -> dict[str, Any]:
        """The figures of a way, or why there are none."""
        try:
            return {"us_per_token": self.us_per_token(way), "peak_bytes": self._peak_bytes(way)}
        except (ImportError, RuntimeError) as error:
            return {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:200]}

    def us_per_token(self, way: Callable[[], None]) -> float:
        """The median over rounds, after one that does not count."""
        seconds = [self._seconds(way) for _ in range(self._size.head_rounds + 1)]
        return 1e6 * statistics.median(seconds[1:]) / self._size.head_tokens

    def once(self, chunk: int, *, together: bool = False) -> None:
        """As the trainer computes it; `together`: as for losses of whole responses."""
        lengths = [self._width] * _RESPONSES if together else []
        given = (self._states, self._weight, None, self._targets, self._loss)
        objective, _, _ = token_objective(*given, together=lengths, logits_per_chunk=chunk)
        objective.backward()  # type: ignore[no-untyped-call]

    def _twice(self, chunk: int) -> None:
        logprobs, _ = token_logprobs(self._states, self._weight, None, self._targets, logits_per_chunk=chunk)
        self._loss(logprobs, slice(0, len(logprobs))).sum().backward()  # type: ignore[no-untyped-call]

    def _loss(self, logprobs: Tensor, tokens: slice) -> Tensor:
        """PPO's clipped surrogate on policy."""
        advantages = self._advantages.repeat_interleave(self._width)[tokens]
        ratio = (logprobs - logprobs.detach()).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    def _liger_grpo(self) -> None:
        mask = torch.ones(_RESPONSES, self._width, device=self._states.device)
        liger = importlib.import_module("liger_kernel.chunked_loss")
        loss = liger.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
        states, targets = (
            each.view(_RESPONSES, self._width, *each.shape[1:]) for each in (self._states, self._targets)
        )
        loss(states, self._weight, targets, mask, self._advantages)[0].backward()

    def _liger_cross_entropy(self) -> None:
        """The same work as a loss without weights of tokens; no policy loss."""
        liger = importlib.import_module("liger_kernel.transformers")
        liger.LigerFusedLinearCrossEntropyLoss(reduction="sum")(self._weight, self._states, self._targets).backward()

    def _seconds(self, way: Callable[[], None]) -> float:
        """Seconds of one value with its gradient."""
        began_s = time.perf_counter()
        way()
        if self._size.device == "cuda":
            torch.cuda.synchronize()
        self._states.grad = self._weight.grad = None
        return time.perf_counter() - began_s

    def _peak_bytes(self, way: Callable[[], None]) -> int:
        """The most bytes at once besides states and head, their gradients included."""
        if self._size.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = int(torch.cuda.memory_allocated())
            self._seconds(way)
            return int(torch.cuda.max_memory_allocated()) - before
        with LiveBytes() as memory:
            self._seconds(way)
        return int(memory.peak)
