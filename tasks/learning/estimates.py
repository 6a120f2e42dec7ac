"""Estimates: advantages, returns, values and KL of each response, computed before it is trained, without gradient.

Estimates are kept on the CPU, keyed by response number, and so fit any division into forward passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from storage.records.records import GradedResponse, SamplingParams
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.learning.advantage import advantages_of
from tasks.learning.batching import IDLE, TokenBatch
from tasks.learning.distillation import TokenScores
from tasks.learning.learner import Learner
from tasks.learning.optimizer import NonFiniteGradient
from tasks.learning.scoring import per_token
from tasks.learning.shaping import counted_responses, overlong_penalties, trained_responses
from tasks.learning.step import reference_kl

ByResponse = dict[int, Tensor]
Passes = Callable[[Sequence[GradedResponse]], Iterator[TokenBatch]]
# How far the reward has fallen at the end of the buffer, as in DAPO (arXiv 2503.14476, equation 13).
OVERLONG_PENALTY = 1.0


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Estimates by response number, for trained responses only, unless noted otherwise.

    "Tokens of the response" means tokens that the policy sampled; observations are skipped.

    Attributes:
        advantages: [] or [tokens of the response], float64; also for responses that are not trained.
        kl: With kl_in "reward", the KL to the reference at every token, [tokens of the response]; also for untrained
            responses, except responses that failed.
        values: With a critic, its values before the first optimizer step, [tokens of the response] float32.
        returns: With a critic, its targets, [tokens of the response] float64.
        first_logprobs: The policy's log-probs before the first optimizer step, [tokens of the response]; None for an
            iteration of one step.
        teacher: The teachers' scores of every response that did not fail; None without a teacher.
    """

    advantages: ByResponse
    kl: ByResponse | None = None
    values: ByResponse | None = None
    returns: ByResponse | None = None
    first_logprobs: ByResponse | None = None
    teacher: Mapping[int, TokenScores] | None = None


def trained(
    responses: Sequence[GradedResponse], algorithm: AlgorithmConfig, num_generations: int
) -> list[GradedResponse]:
    """The trained responses among the responses of whole groups, in order."""
    kept = trained_responses([graded.finish_reason for graded in responses], algorithm, num_generations)
    return [responses[index] for index in kept]


def counted(responses: Sequence[GradedResponse], num_generations: int) -> list[bool]:
    """Whether each response of whole groups counts in its group (`tasks.learning.shaping.counted_responses`)."""
    kept = set(counted_responses([graded.finish_reason for graded in responses], num_generations))
    return [index in kept for index in range(len(responses))]


def estimate(
    responses: Sequence[GradedResponse],
    learner: Learner,
    algorithm: AlgorithmConfig,
    sampling: SamplingParams,
    num_generations: int,
    passes: Passes,
) -> Estimates:
    """Compute the estimates of responses whose advantages depend on each other: whole groups, or the whole step.

    Raises:
        ValueError: kl_in is "reward" without a reference policy, an estimator that needs a critic has none, or the
            estimator raises ValueError.
        NonFiniteGradient: A value or a KL is not finite; names the responses.
    """
    kl = _reference_kl(responses, learner, algorithm, sampling, passes) if algorithm.kl_in == "reward" else None
    # What stands for the reward of a response that failed is not read.
    rewards = torch.tensor([graded.reward or 0.0 for graded in responses], dtype=torch.float64)
    kl_rows = None if kl is None else [kl.get(graded.response, rewards.new_zeros(0)) for graded in responses]
    rewards = rewards + length_penalties(responses, algorithm, sampling)
    kept = trained(responses, algorithm, num_generations)
    in_training = {graded.response for graded in kept}
    lengths = torch.tensor([graded.policy_length if graded.response in in_training else 0 for graded in responses])
    names = [graded.response for graded in responses]
    values = by_row = None
    if algorithm.estimator.needs_critic:
        values = _values(kept, learner, algorithm, passes)
        by_row = [values.get(name, torch.zeros(0)) for name in names]
    given = torch.tensor(counted(responses, num_generations))
    rows, returns = advantages_of(
        rewards, lengths, num_generations, algorithm, kl=kl_rows, values=by_row, counted=given
    )
    return Estimates(
        advantages=dict(zip(names, rows, strict=True)),
        kl=kl,
        values=values,
        returns=None if values is None or returns is None else dict(zip(names, returns, strict=True)),
    )


def length_penalties(
    responses: Sequence[GradedResponse], algorithm: AlgorithmConfig, sampling: SamplingParams
) -> Tensor:
    """The penalties of long responses (DAPO's overlong shaping), [B] float64, at most 0.

    Lengths include observations, as max_completion_length does.
    """
    lengths = torch.tensor([graded.length for graded in responses])
    buffer = algorithm.overlong_buffer_length
    if buffer is None:
        return torch.zeros(len(responses), dtype=torch.float64)
    return overlong_penalties(lengths, sampling.max_completion_length, buffer, OVERLONG_PENALTY)


@torch.no_grad()
def first_logprobs(
    responses: Sequence[GradedResponse], learner: Learner, temperature: float, passes: Passes
) -> ByResponse:
    """The log-probs of every token under the current policy, [tokens of the response] float32 each."""
    found: ByResponse = {}
    for batch in passes(responses):
        found |= by_response(learner.policy.logprobs(batch, temperature)[0], batch)
    return _of_all_ranks(found, learner, torch.float32, "log-prob")


def padded(rows: Mapping[int, Tensor], batch: TokenBatch) -> Tensor:
    """The rows of a batch's responses as the loss takes them, in float32: [B, T], or [B] if rows are scalars."""
    chosen = [rows[response].to(torch.float32) for response in batch.responses]
    return per_token(torch.cat(chosen), batch) if chosen[0].dim() else torch.stack(chosen)


def by_response(values: Tensor, batch: TokenBatch) -> ByResponse:
    """Divide [B, T] into a row per response with the tokens inside the mask, on the CPU."""
    rows, masks = values.detach().cpu(), batch.response_mask.cpu()
    return {name: row[mask] for name, row, mask in zip(batch.responses, rows, masks, strict=True)}


def _reference_kl(
    responses: Sequence[GradedResponse],
    learner: Learner,
    algorithm: AlgorithmConfig,
    sampling: SamplingParams,
    passes: Passes,
) -> ByResponse:
    """The KL at each token of every graded response; the mean of a group counts untrained responses, too."""
    if learner.reference is None:
        raise ValueError("kl_in: value 'reward'; allowed: 'loss' without a reference policy")
    found: ByResponse = {}
    for batch in passes([graded for graded in responses if graded.reward is not None]):
        rows = reference_kl(learner.policy, learner.reference, batch, algorithm, temperature=sampling.temperature)
        found |= by_response(rows, batch)
    return _of_all_ranks(found, learner, torch.float64, "KL to the reference")


@torch.no_grad()
def _values(
    responses: Sequence[GradedResponse], learner: Learner, algorithm: AlgorithmConfig, passes: Passes
) -> ByResponse:
    if learner.critic is None:
        raise ValueError(
            f"advantage_estimator: value {algorithm.advantage_estimator!r}; allowed: others without a critic"
        )
    found: ByResponse = {}
    for batch in passes(responses):
        found |= by_response(learner.critic.critic.values(batch), batch)
    return _of_all_ranks(found, learner, torch.float32, "value of the critic")


def _of_all_ranks(found: ByResponse, learner: Learner, dtype: torch.dtype, what: str) -> ByResponse:
    """The rows of all ranks together; every rank must call it. Raises NonFiniteGradient with the responses."""
    found.pop(IDLE, None)
    rows = learner.ranks.gather_rows(found, dtype)
    # Normalisation over the step would spread one such row to all, and the error would name the first pass instead.
    if spoilt := [name for name, row in rows.items() if not bool(torch.isfinite(row).all())]:
        raise NonFiniteGradient(what, spoilt)
    return rows
