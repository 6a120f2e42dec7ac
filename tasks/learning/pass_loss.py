"""The loss of one forward pass as a function of its log-probs: for whole responses, or token by token.

This module decides which objectives may be computed token by token.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.learning.correction import ImportanceMode
from tasks.learning.importance import importance_weights, log_ratios
from tasks.learning.loss import TokenLosses, token_losses


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
        first_logprobs: [B, T], of the policy before the iteration's first optimizer step; None takes those of this
            pass.
        reference_logprobs: [B, T], or None without a reference.
    """

    algorithm: AlgorithmConfig
    mode: ImportanceMode | None
    weights: Tensor
    advantages: Tensor
    response_mask: Tensor
    sampler_logprobs: Tensor
    first_logprobs: Tensor | None
    reference_logprobs: Tensor | None

    @property
    def is_by_token(self) -> bool:
        """Whether the loss of a token depends on no other token of its response."""
        return self.algorithm.policy_loss != "gspo" and self.mode != "sequence-mask"

    def terms(self, logprobs: Tensor) -> LossTerms:
        """The terms of the loss at log-probs [B, T]; ValueError for a KL in the loss without a reference."""
        sampler = self.sampler_logprobs.to(logprobs.dtype)
        first = logprobs.detach() if self.first_logprobs is None else self.first_logprobs.to(logprobs.dtype)
        old = first if self.algorithm.old_logprobs == "trainer" else sampler
        ratios = log_ratios(first, sampler, self.response_mask)
        cap = self.algorithm.importance_sampling_cap
        corrections = None if self.mode is None else importance_weights(self.mode, ratios, cap)
        losses = token_losses(
            logprobs,
            old,
            self.advantages,
            self.response_mask,
            algorithm=self.algorithm,
            reference_logprobs=self.reference_logprobs,
            importance_weights=corrections,
        )
        return LossTerms(losses, first, old, ratios, corrections)

    def of_responses(self, logprobs: Tensor) -> Tensor:
        """The weighted sum of token losses, a scalar, from log-probs [B, T]."""
        return (self.terms(logprobs).losses.loss * self.weights.to(logprobs.dtype)).sum()

    def by_token(self, trained: Tensor) -> "PassLoss":
        """The same loss with each token in the mask as a response of its own, in the mask's order; B counts tokens.

        trained: as in `TokenBatch`.
        """

        def flat(values: Tensor) -> Tensor:
            return values.expand(self.response_mask.shape).flatten()[trained][:, None]

        advantages = self.advantages if self.advantages.dim() == 2 else self.advantages[:, None]
        return replace(
            self,
            weights=flat(self.weights),
            advantages=flat(advantages),
            response_mask=flat(self.response_mask),
            sampler_logprobs=flat(self.sampler_logprobs),
            first_logprobs=None if self.first_logprobs is None else flat(self.first_logprobs),
            reference_logprobs=None if self.reference_logprobs is None else flat(self.reference_logprobs),
        )

    def of_rows(self, logprobs: Tensor, rows: slice) -> Tensor:
        """The weighted losses [n] of some one-token responses of `by_token`, from their log-probs [n]."""
        part = replace(
            self,
            weights=self.weights[rows],
            advantages=self.advantages[rows],
            response_mask=self.response_mask[rows],
            sampler_logprobs=self.sampler_logprobs[rows],
            first_logprobs=None if self.first_logprobs is None else self.first_logprobs[rows],
            reference_logprobs=None if self.reference_logprobs is None else self.reference_logprobs[rows],
        )
        return (part.terms(logprobs[:, None]).losses.loss * part.weights.to(logprobs.dtype))[:, 0]
