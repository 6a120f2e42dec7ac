"""A loss of token log-probs and its gradient in one pass over the head, with logits computed once, chunk by chunk.

A chunk must have every token on whose log-prob a loss in the chunk depends. The chunk's logits give log-probs, the loss
gives derivatives with respect to log-probs, and the derivatives turn the logits into their gradient in place, as in
Liger's fused linear losses (arXiv 2410.10989, section 3.2): three products with the head. If a response with dependent
tokens is longer than a chunk, the logits of all its chunks but the last are computed again: up to four products.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tasks.learning.token_logprobs import Head, chunk_rows, distributions

# A function from the log-probs [n] of some tokens, which need a gradient, and these tokens' slice to their losses [n].
TokenLoss = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True)
class HeadTerm:
    """A further term of the loss of each token, by the log-probs of several tokens of the vocabulary at its place.

    Attributes:
        ids: [N, K] int64, the tokens.
        loss: A function from the log-probs [n, K] of some places, which need a gradient, and these places' slice to the
            terms [n].
        weights: [N], the factor of each term in the sum.
        measured: [N], which the pass fills with the terms.
    """

    ids: Tensor
    loss: TokenLoss
    weights: Tensor
    measured: Tensor

    def differentiated(self, logprobs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The weighted terms [n], and the derivatives [n, K] of their sum."""
        with torch.enable_grad():
            leaf = logprobs.detach().requires_grad_()
            terms = self.loss(leaf, rows)
            weighted = terms * self.weights[rows].to(terms.dtype)
            (slopes,) = torch.autograd.grad(weighted.sum(), leaf)
        self.measured[rows] = terms.detach().to(self.measured.dtype)
        return weighted.detach(), slopes


def token_objective(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    loss: TokenLoss,
    *,
    together: Sequence[int] = (),
    temperature: float = 1.0,
    logits_per_chunk: int | None = None,
    label_smoothing: float = 0.0,
    term: HeadTerm | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of `loss` and `term` over tokens, their log-probs and the entropies of their distributions.

    Values, products and dtypes are those of `tasks.learning.token_logprobs.token_logprobs`. The gradient is computed
    together with the value and kept for one backward pass.

    Args:
        hidden: [N, H].
        weight: [V, H]; cast to the dtype of `hidden`.
        bias: [V] or None.
        targets: [N] int64.
        loss: Called for stretches of consecutive tokens; every token is in exactly one call.
        together: The lengths of stretches of tokens whose losses depend on each other's log-probs, covering all N
            tokens; `loss` then always gets whole stretches. (): a token's loss depends on no other token's log-prob.
        temperature: The divisor of the logits; above 0.
        logits_per_chunk: The most logits that exist at once, in elements; None chooses by device.
        label_smoothing: As for `tasks.learning.token_logprobs.distributions`.
        term: A further term of every token's loss.

    Returns:
        The sum (a scalar, differentiable in hidden, weight and bias); log-probs [N] and entropies [N] without gradient.
    """
    rows = chunk_rows(weight, logits_per_chunk)
    parts = list(_parts(together, rows) if together else _chunks(0, len(hidden), rows))
    given = (hidden, weight, bias, targets, loss, temperature, parts, rows, label_smoothing, term)
    objective, logprobs, entropy = _TokenObjective.apply(*given)  # type: ignore[no-untyped-call]
    return objective, logprobs, entropy


def _chunks(start: int, end: int, most: int) -> Iterator[slice]:
    """Slices of consecutive tokens from `start` to `end`, with at most `most` tokens each."""
    for each in range(start, end, most):
        yield slice(each, min(each + most, end))


def _parts(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Slices of whole stretches: stretches with together at most `most` tokens, or a longer stretch alone."""
    start = end = 0
    for length in lengths:
        if end > start and end + length - start > most:
            yield slice(start, end)
            start = end
        end += length
    if end > start:
        yield slice(start, end)


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
        parts: Sequence[slice],
        rows_per_chunk: int,
        smoothing: float,
        term: HeadTerm | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = Head(hidden, weight, bias, temperature, ctx.needs_input_grad)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, losses = (hidden.new_zeros(len(hidden), dtype=dtype) for _ in range(3))
        # The derivatives with respect to the log-probs of the further tokens.
        slopes = None if term is None else hidden.new_zeros(term.ids.shape, dtype=dtype)
        for part in parts:
            chunks = list(_chunks(part.start, part.stop, rows_per_chunk))
            found = None
            for rows in chunks:
                found = None  # before the next chunk takes as much memory
                at = None if term is None else term.ids[rows]
                found = distributions(head.logits(rows), targets[rows], smoothing, at)
                logprobs[rows], entropy[rows] = found.logprobs, found.entropy
                if term is not None and slopes is not None:
                    losses[rows], slopes[rows] = term.differentiated(found.logprobs_at, rows)
            with torch.enable_grad():
                leaf = logprobs[part].clone().requires_grad_()
                values = loss(leaf, part)
                (scale,) = torch.autograd.grad(values.sum(), leaf)
            losses[part] += values.detach()
            # Backwards, because the last chunk's logits are still there; most parts are one chunk.
            for rows in reversed(chunks):
                if found is None:
                    found = distributions(head.logits(rows), targets[rows])
                scales = scale[rows.start - part.start : rows.stop - part.start]
                taken = scales if slopes is None else scales + slopes[rows].sum(dim=1)
                factors = -taken / (found.total * temperature)
                grad_logits = found.unnormalized.mul_(factors[:, None])
                if term is not None and slopes is not None:
                    grad_logits.scatter_add_(1, term.ids[rows], slopes[rows] / temperature)
                head.add(rows, grad_logits, targets[rows], scales, smoothing)
                found = None
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
        return *(None if each is None else each.mul_(grad_objective) for each in gradients), *[None] * 7
