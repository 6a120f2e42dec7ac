"""The loss of one forward pass as a function of its log-probs, for any of its tokens or for whole responses.

This module decides whether a token's loss depends on further tokens of the response, or of a pair of responses.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.learning.batching import TokenBatch
from tasks.learning.correction import ImportanceMode
from tasks.learning.importance import importance_weights, log_ratios
from tasks.learning.loss import TokenLosses, token_losses
from tasks.learning.token_objective import TokenLoss


@dataclass(frozen=True)
class LossTerms:
    """The terms of a loss; all [B, T].

    Attributes:
        losses: The loss of each token, before its weight.
        first_logprobs: Log-probs of the policy before the iteration's first optimizer step.
        old_logprobs: Log-probs of the policy in the ratio's denominator.
        ratios: log(policy / sampler), for the policy before the iteration's first optimizer step.
        corrections: Importance weights; None if nothing is corrected.
    """

    losses: TokenLosses
    first_logprobs: Tensor
    old_logprobs: Tensor
    ratios: Tensor
    corrections: Tensor | None


@dataclass(frozen=True)
class PassLoss:
    """Everything the loss of a forward pass needs except the log-probs.

    Attributes:
        algorithm: The loss.
        mode: The kind of importance weights that correct for the sampler; None for no correction.
        weights: [B, 1], the weight of a response's tokens in the step's sum.
        advantages: [B] or [B, T].
        response_mask: [B, T] bool.
        sampler_logprobs: [B, T].
        first_logprobs: [B, T], of the policy before the iteration's first optimizer step; None takes the log-probs of
            this pass.
        reference_logprobs: [B, T], or None without a reference.
        teacher_logprobs: [B, T], or None without a teacher whose log-probs change the advantages.
        teacher_weight: The factor of log(policy / teacher), by which a token's advantage is lower.
    """

    algorithm: AlgorithmConfig
    mode: ImportanceMode | None
    weights: Tensor
    advantages: Tensor
    response_mask: Tensor
    sampler_logprobs: Tensor
    first_logprobs: Tensor | None
    reference_logprobs: Tensor | None
    teacher_logprobs: Tensor | None = None
    teacher_weight: float = 0.0

    @property
    def is_by_token(self) -> bool:
        """Whether the loss of a token depends on no other token of its response.

        Before the iteration's first optimizer step a response's ratio to its own policy is 1, whatever its tokens are.
        """
        ratio_is_known = self.first_logprobs is None and self.algorithm.old_logprobs == "trainer"
        alone = {"token", "ratio"} if ratio_is_known else {"token"}
        return self.algorithm.loss.depends_on in alone and self.mode != "sequence-mask"

    def terms(self, logprobs: Tensor) -> LossTerms:
        """The terms of the loss at log-probs [B, T]; ValueError for a KL or a loss of pairs without a reference."""
        sampler = self.sampler_logprobs.to(logprobs.dtype)
        first = logprobs.detach() if self.first_logprobs is None else self.first_logprobs.to(logprobs.dtype)
        reference = self.reference_logprobs
        old = first if self.algorithm.old_logprobs == "trainer" else sampler
        if self.algorithm.learns_pairs:
            if reference is None:
                raise ValueError("kind: value 'dpo'; allowed: others without a reference policy")
            # The ratio of the loss is to the reference, and no further term is.
            old, reference = reference.to(logprobs.dtype), None
        ratios = log_ratios(first, sampler, self.response_mask)
        cap = self.algorithm.importance_sampling_cap
        corrections = None if self.mode is None else importance_weights(self.mode, ratios, cap)
        losses = token_losses(
            logprobs,
            old,
            self._taught_advantages(old),
            self.response_mask,
            algorithm=self.algorithm,
            reference_logprobs=reference,
            importance_weights=corrections,
        )
        return LossTerms(losses, first, old, ratios, corrections)

    def _taught_advantages(self, old: Tensor) -> Tensor:
        """The advantages less the reverse KL to the teacher at each sampled token, by the ratio's denominator."""
        if self.teacher_logprobs is None:
            return self.advantages
        gap = (old.detach() - self.teacher_logprobs.to(old.dtype)).masked_fill(~self.response_mask, 0.0)
        advantages = self.advantages if self.advantages.dim() == 2 else self.advantages[:, None]
        return advantages - self.teacher_weight * gap

    def of_tokens(self, batch: TokenBatch) -> tuple[TokenLoss, Sequence[int]]:
        """The arguments `loss` and `together` of `token_objective`: weighted losses of tokens, in the mask's order.

        batch: the batch of the loss, on the device of the loss.
        """
        if self.is_by_token:
            return self._by_token(batch.trained)._of_rows, ()  # noqa: SLF001 - of this class
        size = 2 if self.algorithm.loss.depends_on == "pair" else 1
        ends = list(accumulate(batch.trained_lengths))[size - 1 :: size]
        width = self.response_mask.shape[1]

        def of_responses(logprobs: Tensor, tokens: slice) -> Tensor:
            rows = slice(size * bisect_right(ends, tokens.start), size * (bisect_left(ends, tokens.stop) + 1))
            part = self._of(rows)
            places = batch.trained[tokens] - rows.start * width
            spread = logprobs.new_zeros(part.response_mask.numel()).scatter(0, places, logprobs)
            return part.weighted(spread.view(part.response_mask.shape)).flatten()[places]

        return of_responses, [end - start for start, end in pairwise((0, *ends))]

    def weighted(self, logprobs: Tensor) -> Tensor:
        """The weighted losses [B, T] from log-probs [B, T]."""
        return self.terms(logprobs).losses.loss * self.weights.to(logprobs.dtype)

    def _by_token(self, trained: Tensor) -> "PassLoss":
        """The loss with each token in the mask as a response of its own, in the mask's order; B counts tokens.

        trained: as in `TokenBatch`.
        """

        def flat(values: Tensor) -> Tensor:
            return values.expand(self.response_mask.shape).flatten()[trained][:, None]

        advantages = self.advantages if self.advantages.dim() == 2 else self.advantages[:, None]
        return _each(replace(self, advantages=advantages), flat)

    def _of_rows(self, logprobs: Tensor, rows: slice) -> Tensor:
        """The weighted losses [n] of some one-token responses of `_by_token`, from their log-probs [n]."""
        return self._of(rows).weighted(logprobs[:, None])[:, 0]

    def _of(self, rows: slice) -> "PassLoss":
        """The loss of some responses."""
        return _each(self, lambda values: values[rows])


def _each(loss: PassLoss, change: Callable[[Tensor], Tensor]) -> PassLoss:
    """The same loss with other tensors."""
    changed: dict[str, Any] = {name: change(each) for name, each in vars(loss).items() if isinstance(each, Tensor)}
    return replace(loss, **changed)
