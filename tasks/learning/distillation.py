"""Distillation: a teacher's scores of the sampled tokens, and the divergence of policy and teacher. Pure functions.

Without `top_k` the teacher's log-prob of a sampled token changes the token's advantage. With `top_k` the divergence of
two distributions, over the teacher's most likely tokens and the rest, is a term of the loss with a gradient.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.configuration.teacher import Divergence, TeacherConfig
from tasks.learning.batching import TokenBatch
from tasks.learning.scoring import per_token
from tasks.learning.token_logprobs import Head, chunk_rows, distributions
from tasks.learning.token_objective import HeadTerm

# The rest of the vocabulary has at least this probability, as in TRL, because rounding would make it 0 or less.
_REST_MIN = 1e-7


@dataclass(frozen=True)
class TokenScores:
    """What a teacher says of n sampled tokens.

    Attributes:
        logprobs: [n] float32, of the sampled tokens.
        agrees: [n] bool, whether the sampled token is the teacher's most likely token.
        head_ids: [n, K] int64, or int32 to be kept: the teacher's most likely tokens, the likeliest first; K is 0
            without `top_k`.
        head_logprobs: [n, K] float32, of `head_ids`.
    """

    logprobs: Tensor
    agrees: Tensor
    head_ids: Tensor
    head_logprobs: Tensor


@dataclass(frozen=True)
class Taught:
    """A teacher's scores of the tokens in the mask of a pass, in the order of the mask.

    Attributes:
        config: The weight, the kind of divergence and `top_k`.
        scores: Of n tokens, on any device.
    """

    config: TeacherConfig
    scores: TokenScores

    def head_term(self, batch: TokenBatch, weights: Tensor) -> HeadTerm | None:
        """The divergence over the teacher's head as a term of the loss; None without `top_k`.

        batch: the batch of the pass, on the device of the loss. weights: [B, 1], of a response's tokens.
        """
        if self.config.top_k is None:
            return None
        device = batch.response_mask.device
        teacher = self.scores.head_logprobs.to(device, non_blocking=True)
        by_token = self.config.weight * weights.expand(batch.response_mask.shape).flatten()[batch.trained]

        def loss(policy: Tensor, rows: slice) -> Tensor:
            return head_divergence(policy, teacher[rows].to(policy.dtype), self.config.kl)

        ids = self.scores.head_ids.to(device, non_blocking=True).long()
        return HeadTerm(ids, loss, by_token, torch.zeros_like(by_token))

    def logprobs(self, batch: TokenBatch) -> Tensor | None:
        """The teacher's log-probs of the sampled tokens, [B, T], for the advantages; None with `top_k`."""
        if self.config.top_k is not None:
            return None
        return per_token(self.scores.logprobs.to(batch.response_mask.device), batch)

    def measured(self, term: HeadTerm | None, policy: Tensor, batch: TokenBatch) -> dict[str, float]:
        """Sums over the tokens of a pass by the metrics' names: "kl", "agreement", and with `term` "divergence".

        policy: [B, T] log-probs of the sampled tokens before the iteration's first optimizer step.
        """
        device = policy.device
        own = policy.flatten()[batch.trained]
        sums = {"kl": own - self.scores.logprobs.to(device), "agreement": self.scores.agrees.to(device)}
        sums |= {} if term is None else {"divergence": term.measured}
        found = torch.stack([each.sum(dtype=torch.float64) for each in sums.values()]).tolist()
        return dict(zip(sums, found, strict=True))


def head_divergence(policy: Tensor, teacher: Tensor, kl: Divergence) -> Tensor:
    """The divergence of each token's two distributions over some tokens and the rest of the vocabulary, [n].

    The rest counts as one more token, with the remaining probability, as TRL's `loss_add_tail` has it. So the
    divergence is never negative, and 0 only if both distributions agree about each of the tokens.

    Args:
        policy: [n, K] log-probs, with gradient.
        teacher: [n, K] log-probs of the same tokens; detached here.
        kl: "forward" is KL(teacher || policy), "reverse" KL(policy || teacher), "jsd" the mean of the KL of each to the
            mean of both (arXiv 2306.13649, equation 1, with a beta of 0.5).
    """
    policy, teacher = _with_rest(policy), _with_rest(teacher.detach())
    p, q = policy.exp(), teacher.exp()
    if kl == "forward":
        return (q * (teacher - policy)).sum(dim=1)
    if kl == "reverse":
        return (p * (policy - teacher)).sum(dim=1)
    mean = torch.logaddexp(policy, teacher) - math.log(2)
    return (q * (teacher - mean) + p * (policy - mean)).sum(dim=1) / 2


def _with_rest(logprobs: Tensor) -> Tensor:
    """Log-probs [n, K] with that of all further tokens together, [n, K + 1]."""
    total = torch.logsumexp(logprobs, dim=1, keepdim=True).clamp(max=-_REST_MIN)
    return torch.cat([logprobs, torch.log(-torch.expm1(total))], dim=1)


@torch.no_grad()
def score_tokens(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, temperature: float, top_k: int
) -> TokenScores:
    """The scores of tokens under a linear head; arguments as for `tasks.learning.token_logprobs.token_logprobs`.

    top_k: the number of the likeliest tokens; at most V.
    """
    head = Head(hidden, weight, bias, temperature)
    parts = []
    step = chunk_rows(weight, None)
    for start in range(0, len(hidden), step):
        rows = slice(start, start + step)
        logits = head.logits(rows)
        likeliest = logits.topk(max(1, top_k), dim=1).indices
        found = distributions(logits, targets[rows], at=likeliest[:, :top_k])
        parts.append(
            TokenScores(found.logprobs, likeliest[:, 0] == targets[rows], likeliest[:, :top_k], found.logprobs_at)
        )
    return joined(parts)


def joined(parts: list[TokenScores]) -> TokenScores:
    """The scores of several stretches of tokens, at least one, as the scores of one."""
    return TokenScores(*(torch.cat(each) for each in zip(*(vars(part).values() for part in parts), strict=True)))
