"""An optimizer step: the gradient of micro-batches is accumulated, then applied once.

The differentiated quantity is the sum of weighted token losses. The division by the step's denominator comes at the
end, so neither the number nor the order of micro-batches biases the result.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.learning.batching import TokenBatch
from tasks.learning.correction import importance_mode
from tasks.learning.distillation import Taught
from tasks.learning.importance import over_cap
from tasks.learning.loss import TokenLosses, kl_penalty, token_weights
from tasks.learning.optimizer import NonFiniteGradient, PolicyOptimizer
from tasks.learning.packing import is_packed
from tasks.learning.pass_loss import LossTerms, PassLoss
from tasks.learning.policy import Policy, Scores
from tasks.learning.sharded import add_nothing
from tasks.learning.token_objective import HeadTerm
from tasks.learning.totals import StepTotals, measure, measure_importance

# The metrics of a step on examples, which have neither a sampler nor an older policy.
OF_EXAMPLES = ("loss", "entropy", "num_tokens", "padding_share", "shared_prompt_share")


def accumulate(
    policy: Policy,
    batch: TokenBatch,
    advantages: Tensor,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    max_completion_length: int,
    reference: Scores | None = None,
    first_logprobs: Tensor | None = None,
    same_engine: bool = True,
    taught: Taught | None = None,
) -> StepTotals:
    """Add one micro-batch's gradient to the policy's.

    With old_logprobs "trainer" the ratio's denominator is the policy before the iteration's first optimizer step. In
    the first step, the denominator comes from this very forward pass, so the ratio is exactly 1, whatever the sampler's
    rounding. With importance sampling, the policy loss of each token is weighted by the ratio of the policy before the
    first step to the sampler's; see `tasks.learning.importance`.

    Args:
        policy: The model that gets the gradient.
        batch: B responses.
        advantages: [B], or [B, T].
        algorithm: The loss.
        temperature: The temperature of the sampling.
        max_completion_length: The run's limit; used by "seq-mean-token-sum-norm".
        reference: The reference policy; needed for pairs and a KL in the loss, otherwise its KL is only measured.
        first_logprobs: [B, T] float32, of the policy before the iteration's first optimizer step; None in that step.
        same_engine: True if the sampler's log-probs are known to equal the trainer's; used by importance_sampling
            "auto".
        taught: A teacher's scores of the batch; None without a teacher.

    Raises:
        NonFiniteGradient: The loss is not finite; names the responses with such losses. The gradient is dropped.
        ValueError: Advantages have another shape, a needed reference is missing, or a user's loss does not fit.
    """
    if advantages.shape not in (batch.response_mask.shape[:1], batch.response_mask.shape):
        number, longest = batch.response_mask.shape
        raise ValueError(f"advantages: shape {tuple(advantages.shape)}; allowed: [{number}] or [{number}, {longest}]")
    batch = batch.to(policy.device)
    loss = PassLoss(
        algorithm=algorithm,
        mode=importance_mode(algorithm, same_engine=same_engine),
        weights=token_weights(batch.lengths, algorithm.aggregation, max_completion_length)[:, None],
        advantages=advantages.to(policy.device, non_blocking=True),
        response_mask=batch.response_mask,
        sampler_logprobs=batch.sampler_logprobs,
        first_logprobs=None if first_logprobs is None else first_logprobs.to(policy.device, non_blocking=True),
        reference_logprobs=_reference_logprobs(reference, batch, temperature),
        teacher_logprobs=None if taught is None else taught.logprobs(batch),
        teacher_weight=0.0 if taught is None else taught.config.weight,
    )
    term = None if taught is None else taught.head_term(batch, loss.weights.to(policy.device))
    logprobs, entropy = _backward(policy, batch, temperature, loss, term)
    terms = loss.terms(logprobs)
    totals = _tokens_read(batch, packed=is_packed(policy.module)) + _measured(batch, loss, terms, logprobs, entropy)
    if taught is not None:
        added = 0.0 if term is None else float((term.measured * term.weights).sum(dtype=torch.float64))
        of_teacher = taught.measured(term, terms.first_logprobs, batch)
        totals = replace(totals, loss=totals.loss + added, of_teacher=of_teacher)
    if not math.isfinite(totals.loss):
        policy.drop_gradient()
        raise NonFiniteGradient("loss", _non_finite_responses(batch, terms.losses))
    _check_metrics(policy, totals, algorithm)
    if loss.mode is not None and terms.corrections is not None:
        clipped = over_cap(loss.mode, terms.ratios, algorithm.importance_sampling_cap)
        totals += measure_importance(terms.corrections, clipped, batch.response_mask)
    return totals


def _measured(batch: TokenBatch, loss: PassLoss, terms: LossTerms, logprobs: Tensor, entropy: Tensor) -> StepTotals:
    return measure(
        responses=batch.responses,
        losses=terms.losses,
        weights=loss.weights.to(logprobs.dtype),
        logprobs=logprobs,
        first_logprobs=terms.first_logprobs,
        old_logprobs=terms.old_logprobs,
        sampler_logprobs=batch.sampler_logprobs.to(logprobs.dtype),
        entropy=entropy,
        response_mask=batch.response_mask,
    )


def _tokens_read(batch: TokenBatch, *, packed: bool) -> StepTotals:
    read, shared = sum(batch.total_lengths), batch.repeated_tokens if packed else 0
    return StepTotals(read=read, shared=shared, computed=read - shared if packed else batch.input_ids.numel())


def _check_metrics(policy: Policy, totals: StepTotals, algorithm: AlgorithmConfig) -> None:
    """Drop the gradient and raise ValueError if a metric of a user's own loss is not finite."""
    for name, value in totals.of_loss.items():
        if not math.isfinite(value):
            policy.drop_gradient()
            what = f"algorithm.policy_loss: {algorithm.policy_loss!r} returned metrics[{name!r}] with {value}"
            raise ValueError(f"{what}; allowed: finite numbers")


def _backward(
    policy: Policy, batch: TokenBatch, temperature: float, loss: PassLoss, term: HeadTerm | None
) -> tuple[Tensor, Tensor]:
    """Add the gradient of a pass to the policy's; return log-probs and entropies, [B, T], without gradient."""
    losses, together = loss.of_tokens(batch)
    # That of pairs is in the loss.
    smoothing = 0.0 if loss.algorithm.learns_pairs else loss.algorithm.label_smoothing
    logprobs, entropy, objective = policy.objective(batch, temperature, losses, together, smoothing, term)
    objective.backward()  # type: ignore[no-untyped-call]
    return logprobs, entropy


def take_part(policy: Policy, idle: TokenBatch, *, temperature: float, reference: Scores | None = None) -> None:
    """Make a pass of a rank without responses: the collectives of `accumulate` in the same order, and no gradient."""
    _reference_logprobs(reference, idle, temperature)
    add_nothing(policy.logprobs(idle, temperature)[0])


@torch.no_grad()
def reference_kl(
    policy: Policy, reference: Scores, batch: TokenBatch, algorithm: AlgorithmConfig, *, temperature: float
) -> Tensor:
    """The KL to the reference at each token, for the reward; [B, T] float64 on the CPU, without meaning off the mask.

    The KL is estimated by kl_estimator for the policy in the ratio's denominator. With old_logprobs "sampler", the
    engine's recorded log-probs are used, which saves a forward pass.
    """
    batch = batch.to(policy.device)
    trainers = algorithm.old_logprobs == "trainer"
    logprobs = policy.logprobs(batch, temperature)[0] if trainers else batch.sampler_logprobs
    return kl_penalty(logprobs, reference.logprobs(batch, temperature)[0], algorithm.kl_estimator).double().cpu()


def apply(optimizer: PolicyOptimizer, totals: StepTotals, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Take the optimizer step for everything accumulated, and return the step's metrics.

    If no response is trained, no step is taken, because the moments alone would move the weights.

    Args:
        optimizer: The optimizer of the policy whose gradient was accumulated.
        totals: The sum of the results of `accumulate` since the last step.
        algorithm: The aggregation.

    Raises:
        NonFiniteGradient: The gradient is not finite; names all responses of the step. Weights and moments are kept.
        ValueError: Nothing was accumulated.
    """
    if totals.trains_nothing:
        return totals.metrics(algorithm.aggregation) | {"actor/grad_norm": 0.0, "actor/lr": 0.0}
    outcome = optimizer.step(totals.denominator(algorithm.aggregation), totals.responses)
    rates = {"actor/grad_norm": outcome.grad_norm, "actor/lr": outcome.learning_rate}
    metrics = totals.metrics(algorithm.aggregation)
    if algorithm.learns_examples:
        metrics = {name: metrics[name] for name in OF_EXAMPLES} | totals.pair_metrics()
    return metrics | rates


def _reference_logprobs(reference: Scores | None, batch: TokenBatch, temperature: float) -> Tensor | None:
    if reference is None:
        return None
    with torch.no_grad():
        return reference.logprobs(batch, temperature)[0]


def _non_finite_responses(batch: TokenBatch, losses: TokenLosses) -> list[int]:
    finite = torch.isfinite(losses.loss).all(dim=1).tolist()
    return [response for response, is_finite in zip(batch.responses, finite, strict=True) if not is_finite]
