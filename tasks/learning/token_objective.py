"""A loss of token log-probs and its gradient in one pass over the head, which computes logits once, chunk by chunk.

This is possible if the loss of a token depends on no other token's log-prob. A chunk of logits then gives log-probs,
the loss gives its derivatives with respect to them, and these turn the chunk into the gradient of the logits in place,
as in Liger's fused linear losses (arXiv 2410.10989, section 3.2).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tasks.learning.token_logprobs import Head, chunk_rows, distributions

# A function from the log-probs [n] of some tokens, which need a gradient, and these tokens' slice to their losses [n].
TokenLoss = Callable[[Tensor, slice], Tensor]


def token_objective(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    loss: TokenLoss,
    *,
    temperature: float = 1.0,
    logits_per_chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of `loss` over tokens, their log-probs and the entropies of their distributions.

    Values, products and dtypes are those of `tasks.learning.token_logprobs.token_logprobs`. The gradient is computed
    together with the value and kept for one backward pass.

    Args:
        hidden: [N, H].
        weight: [V, H]; cast to the dtype of `hidden`.
        bias: [V] or None.
        targets: [N] int64.
        loss: Called for each chunk; a token's loss may depend on no other token's log-prob.
        temperature: The divisor of the logits; above 0.
        logits_per_chunk: The most logits that exist at once, in elements; None chooses by device.

    Returns:
        The sum (a scalar, differentiable in hidden, weight and bias); log-probs [N] and entropies [N] without gradient.
    """
    rows = chunk_rows(weight, logits_per_chunk)
    objective, logprobs, entropy = _TokenObjective.apply(hidden, weight, bias, targets, loss, temperature, rows)  # type: ignore[no-untyped-call]
    return objective, logprobs, entropy


class _TokenObjective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        loss: TokenLoss,
        temperature: float,
        rows_per_chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = Head(hidden, weight, bias, temperature, ctx.needs_input_grad)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, losses = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        for start in range(0, len(hidden), rows_per_chunk):
            rows = slice(start, start + rows_per_chunk)
            found = distributions(head.logits(rows), targets[rows])
            logprobs[rows], entropy[rows] = found.logprobs, found.entropy
            with torch.enable_grad():
                leaf = found.logprobs.requires_grad_()
                values = loss(leaf, rows)
                (scale,) = torch.autograd.grad(values.sum(), leaf)
            losses[rows] = values.detach()
            scaled = found.unnormalized.mul_((-scale / (found.total * temperature))[:, None])
            head.add(rows, scaled, targets[rows], scale)
        ctx.gradients = head.gradients()
        objective = losses.sum()
        ctx.mark_non_differentiable(logprobs, entropy)
        return objective, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_objective: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("token_objective: its gradient was taken already, and is not kept")
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if each is None else each.mul_(grad_objective) for each in gradients), None, None, None, None
