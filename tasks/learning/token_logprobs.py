"""Log-probs of given tokens under a linear head, without the whole [tokens, vocabulary] matrix in memory.

Logits are computed chunk by chunk in the forward pass and again in the backward pass, where the gradient of a
log-softmax is known in closed form. `tasks.learning.token_objective` computes logits only once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - torch's own custom

from tasks.learning.cpu_products import suits_onednn, times_transposed

LOGITS_PER_CHUNK = 1 << 24
# A GPU reads the whole head from its memory for every chunk, so it waits for memory if a chunk has few tokens. A
# logit takes about 16 bytes while its chunk is computed, and a chunk may take this share of the memory.
GPU_LOGITS_MAX, LOGIT_BYTES, GPU_MEMORY_SHARE = 1 << 27, 16, 1 / 32
# On a CPU a chunk should fit into a cache, but have enough rows to make reading the weights for a product worthwhile.
CACHED_LOGITS, CPU_ROWS_MIN = 1 << 18, 128


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    logits_per_chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log_softmax((hidden @ weight.T + bias) / temperature) at `targets`, and the distribution's entropy.

    Products use the dtype of `hidden`; everything after them is in float32 (float64 for float64 inputs).

    Args:
        hidden: [N, H].
        weight: [V, H]; cast to the dtype of `hidden`.
        bias: [V] or None.
        targets: [N] int64.
        temperature: The divisor of the logits; above 0.
        logits_per_chunk: The most logits that exist at once, in elements; None chooses by device.

    Returns:
        Log-probs [N], differentiable in hidden, weight and bias; entropies [N] in nats, without gradient.
    """
    rows = chunk_rows(weight, logits_per_chunk)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, rows)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def chunk_rows(weight: Tensor, logits_per_chunk: int | None) -> int:
    """The tokens of a chunk with at most `logits_per_chunk` logits, or for None a number that is fast on the device."""
    vocab_size = weight.shape[0]
    if logits_per_chunk is None and weight.device.type == "cpu":
        return max(1, min(LOGITS_PER_CHUNK // vocab_size, max(CPU_ROWS_MIN, CACHED_LOGITS // vocab_size)))
    if logits_per_chunk is None and weight.device.type == "cuda":
        logits_per_chunk = gpu_logits(torch.cuda.get_device_properties(weight.device).total_memory)
    return max(1, (logits_per_chunk or LOGITS_PER_CHUNK) // vocab_size)


def gpu_logits(memory_bytes: int) -> int:
    """The logits of a chunk on a GPU with this memory: a power of two from LOGITS_PER_CHUNK to GPU_LOGITS_MAX."""
    fit = int(memory_bytes * GPU_MEMORY_SHARE / LOGIT_BYTES)
    return min(GPU_LOGITS_MAX, max(LOGITS_PER_CHUNK, 1 << max(fit.bit_length() - 1, 0)))


class Head:
    """A linear head in the dtype of the hidden states, and the accumulated gradient of its log-probs.

    Args:
        hidden: [N, H].
        weight: [V, H].
        bias: [V] or None.
        temperature: The divisor of the logits.
        needed: Whether hidden, weight and bias need a gradient.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        needed: Sequence[bool] = (False, False, False),
    ) -> None:
        self._hidden, self._temperature = hidden, temperature
        self._weight = weight.to(hidden.dtype)
        self._bias = None if bias is None else bias.to(hidden.dtype)
        # oneDNN computes the transpose of this gradient fast.
        self._transposed = weight.dtype == hidden.dtype and suits_onednn(hidden)
        shape = weight.shape[::-1] if self._transposed else weight.shape
        # The gradient is a sum over many chunks, so it is never in half precision.
        self._weight_dtype, dtype = weight.dtype, torch.promote_types(weight.dtype, torch.float32)
        self._grad_hidden = torch.empty_like(hidden) if needed[0] else None
        self._grad_weight = torch.zeros(shape, dtype=dtype, device=weight.device) if needed[1] else None
        self._grad_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def logits(self, rows: slice) -> Tensor:
        """The logits of some tokens divided by the temperature, [n, V], at least float32; the caller may overwrite."""
        hidden, weight, bias = self._hidden[rows], self._weight, self._bias
        logits = times_transposed(hidden, weight) if bias is None else F.linear(hidden, weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self._temperature == 1.0 else logits.div_(self._temperature)

    def add(
        self, rows: slice, probabilities: Tensor, targets: Tensor, scale: Tensor, label_smoothing: float = 0.0
    ) -> None:
        """Add the gradient of sum(scale * log-prob at target) over some tokens.

        Args:
            rows: The tokens.
            probabilities: [n, V], already multiplied by -scale / temperature; overwritten.
            targets: [n].
            scale: [n].
            label_smoothing: As for `distributions`.
        """
        # d log-prob / d logits = (one-hot - softmax) / temperature
        scale = (scale / self._temperature)[:, None]
        if label_smoothing:
            probabilities += scale * (label_smoothing / probabilities.shape[1])
            scale = scale * (1 - label_smoothing)
        grad_logits = probabilities.scatter_add_(1, targets[:, None], scale)
        if self._grad_bias is not None:
            self._grad_bias += grad_logits.sum(dim=0)
        hidden = self._hidden[rows]
        grad_logits = grad_logits.to(hidden.dtype)
        if self._grad_hidden is not None:
            self._grad_hidden[rows] = times_transposed(grad_logits, self._weight.T)
        if self._grad_weight is None:
            return
        if self._transposed:
            self._grad_weight += times_transposed(hidden.T, grad_logits.T)
        elif self._grad_weight.dtype == hidden.dtype:
            self._grad_weight.addmm_(grad_logits.T, hidden)
        else:
            self._grad_weight += grad_logits.T @ hidden

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The accumulated gradients of hidden, weight and bias."""
        weight, bias = self._grad_weight, self._grad_bias
        if weight is not None:
            weight = (weight.T.contiguous() if self._transposed else weight).to(self._weight_dtype)
        return self._grad_hidden, weight, None if bias is None else bias.to(self._weight_dtype)


@dataclass(frozen=True)
class TokenDistributions:
    """The distributions of n tokens: probabilities are unnormalized / total.

    Attributes:
        unnormalized: [n, V], at most 1.
        total: [n], the sums of `unnormalized`.
        logprobs: [n], at the targets, smoothed if so asked.
        entropy: [n], in nats.
        logprobs_at: [n, K], at the further tokens that were asked for; K is 0 without such tokens.
    """

    unnormalized: Tensor
    total: Tensor
    logprobs: Tensor
    entropy: Tensor
    logprobs_at: Tensor


def distributions(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, at: Tensor | None = None
) -> TokenDistributions:
    """The distributions of logits [n, V], which are overwritten, at targets [n], and at further tokens `at` [n, K].

    label_smoothing: e in (1 - e) * log-prob at the target + e * mean log-prob of the vocabulary, which then stands for
    the log-prob at the target (arXiv 1512.00567, section 7).
    """
    shifted = logits.sub_(logits.amax(dim=1, keepdim=True))
    unnormalized = shifted.exp()
    total = unnormalized.sum(dim=1)
    log_total = total.log()
    at_targets = shifted.gather(1, targets[:, None])[:, 0]
    if label_smoothing:
        at_targets = torch.lerp(at_targets, shifted.mean(dim=1), label_smoothing)
    further = shifted[:, :0] if at is None else shifted.gather(1, at)
    return TokenDistributions(
        unnormalized=unnormalized,
        total=total,
        logprobs=at_targets - log_total,
        entropy=log_total - torch.linalg.vecdot(unnormalized, shifted) / total,
        logprobs_at=further - log_total[:, None],
    )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        rows_per_chunk: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.temperature, ctx.rows_per_chunk = temperature, rows_per_chunk
        head = Head(hidden, weight, bias, temperature)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(2))
        for start in range(0, len(hidden), rows_per_chunk):
            rows = slice(start, start + rows_per_chunk)
            found = distributions(head.logits(rows), targets[rows])
            logprobs[rows], entropy[rows] = found.logprobs, found.entropy
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        head = Head(hidden, weight, bias, ctx.temperature, ctx.needs_input_grad)
        for start in range(0, len(hidden), ctx.rows_per_chunk):
            rows = slice(start, start + ctx.rows_per_chunk)
            scale = grad_logprobs[rows]
            softmax = torch.softmax(head.logits(rows), dim=-1)
            head.add(rows, softmax.mul_(-scale[:, None] / ctx.temperature), targets[rows], scale)
        return *head.gradients(), None, None, None
