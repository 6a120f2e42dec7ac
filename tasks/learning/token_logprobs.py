"""Log-probs of given tokens under a linear head, without the whole [tokens, vocabulary] matrix ever existing.

Logits are made chunk by chunk in the forward pass and again in the backward pass, where the gradient of a log-softmax
is known in closed form. Knows nothing of models or batches.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - torch's own custom

LOGITS_PER_CHUNK = 1 << 24


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
) -> tuple[Tensor, Tensor]:
    """log_softmax((hidden @ weight.T + bias) / temperature) at `targets`, and the entropy of the distribution.

    Products are taken in the dtype of `hidden`; everything after them in float32 (float64 for float64 inputs).

    Args:
        hidden: [N, H].
        weight: [V, H]; cast to the dtype of `hidden`.
        bias: [V] or None.
        targets: [N] int64.
        temperature: Divides the logits; above 0.
        logits_per_chunk: Bounds the logits that exist at once, in elements.

    Returns:
        Log-probs [N], differentiable in hidden, weight and bias; entropies [N] in nats, without gradient.
    """
    rows_per_chunk = max(1, logits_per_chunk // weight.shape[0])
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, rows_per_chunk)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits.div_(temperature)


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
        cast_weight = weight.to(hidden.dtype)
        cast_bias = None if bias is None else bias.to(hidden.dtype)
        logprobs, entropy = [], []
        for rows, target in zip(torch.split(hidden, rows_per_chunk), torch.split(targets, rows_per_chunk), strict=True):
            log_softmax = F.log_softmax(_logits(rows, cast_weight, cast_bias, temperature), dim=-1)
            logprobs.append(log_softmax.gather(1, target[:, None])[:, 0])
            entropy.append(-torch.linalg.vecdot(log_softmax.exp(), log_softmax))
        result = torch.cat(logprobs), torch.cat(entropy)
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        cast_weight = weight.to(hidden.dtype)
        cast_bias = None if bias is None else bias.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(hidden), ctx.rows_per_chunk):
            chunk = slice(start, start + ctx.rows_per_chunk)
            # d logprob / d logits = (one-hot - softmax) / temperature
            scale = grad_logprobs[chunk, None] / ctx.temperature
            softmax = F.softmax(_logits(hidden[chunk], cast_weight, cast_bias, ctx.temperature), dim=-1)
            grad_logits = softmax.mul_(-scale).scatter_add_(1, targets[chunk, None], scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = grad_logits @ cast_weight
            if grad_weight.dtype == hidden.dtype:
                grad_weight.addmm_(grad_logits.T, hidden[chunk])
            else:
                grad_weight += grad_logits.T @ hidden[chunk]
        return grad_hidden, grad_weight, grad_bias, None, None, None
