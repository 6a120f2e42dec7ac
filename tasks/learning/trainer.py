"""The train step of an iteration: follow the journal, grade, record and accumulate micro-batches, step, publish.

A micro-batch is recorded before it is used and replayed from its record after a restart, so a killed trainer ends
where an undisturbed one does. Order of durable writes: batches, training record, checkpoint, weights.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from storage.clock import Clock
from storage.prompt_table import PromptRow
from storage.records import BatchRecord, GradedResponse, PlanRecord, TrainingRecord
from storage.store import ObjectStore
from tasks.grading.grader import Grader
from tasks.learning.advantage import advantages_of, needs_whole_batch
from tasks.learning.batching import TokenBatch, collate, passes
from tasks.learning.config import AlgorithmConfig, TrainerConfig
from tasks.learning.follow import FollowConfig
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.policy import Policy
from tasks.learning.recorded_batches import RecordedBatches
from tasks.learning.shaping import overlong_penalties, trained_responses
from tasks.learning.step import accumulate, apply, leave_out, reference_kl
from tasks.learning.totals import StepTotals, combined

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learner:
    """What is trained: the policy with its optimizer, and the reference policy where the loss has a KL term."""

    policy: Policy
    optimizer: PolicyOptimizer
    reference: Policy | None


class IterationTrainer:
    """Consumes one iteration's journal. `step` leaves the learner one optimizer step further."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        *,
        prompts: Sequence[PromptRow],
        learner: Learner,
        grader: Grader,
        decode: Callable[[Sequence[int]], str],
        algorithm: AlgorithmConfig,
        trainer: TrainerConfig,
        clock: Clock,
        started_at_s: float | None = None,
    ) -> None:
        self._plan = plan
        self._prompts = prompts
        self._learner = learner
        self._algorithm = algorithm
        self._tokens_max = trainer.micro_batch_tokens_max
        self._clock = clock
        self._started_at_s = clock.wall() if started_at_s is None else started_at_s
        self._batches = RecordedBatches(
            store,
            plan,
            prompts=prompts,
            grader=grader,
            decode=decode,
            follow=FollowConfig(
                in_plan_order=algorithm.micro_batch_order == "plan",
                timeout_s=trainer.group_timeout_s,
                poll_interval_s=trainer.poll_interval_s,
            ),
            tokens_max=trainer.micro_batch_tokens_max,
            clock=clock,
        )

    def step(self) -> TrainingRecord:
        """Train on every group of the plan and take the optimizer step; what was measured, not yet stored.

        Raises GroupTimeout, GradingError, NonFiniteGradient or CorruptObject; the learner's weights are then untouched.
        """
        totals: list[StepTotals] = []
        errors: list[str] = []
        responses: list[GradedResponse] = []
        for batches in self._together():
            errors += [error for batch in batches for error in batch.reward_errors]
            responses += [graded for batch in batches for graded in batch.responses]
            totals += self._train(batches)
        metrics = apply(self._learner.optimizer, combined(totals), self._algorithm)
        if self._algorithm.overlong_buffer_length is not None:
            metrics["overlong_penalty"] = float(self._penalties(responses).mean())
        ended_at_s = self._clock.wall()
        return TrainingRecord(
            iteration=self._plan.iteration,
            weight_version=self._plan.weight_version + 1,
            metrics={**metrics, "reward": sum(graded.reward for graded in responses) / len(responses)},
            reward_errors=tuple(errors),
            started_at_s=self._started_at_s,
            ended_at_s=ended_at_s,
        )

    def _together(self) -> Iterator[list[BatchRecord]]:
        """The micro-batches whose advantages depend on each other: each alone, or all, recorded before the first."""
        if needs_whole_batch(self._algorithm):
            yield list(self._batches)
        else:
            yield from ([batch] for batch in self._batches)

    def _train(self, batches: Sequence[BatchRecord]) -> Iterator[StepTotals]:
        """Accumulate the gradient of micro-batches whose advantages are computed together."""
        kl = [self._reference_kl(batch) for batch in batches] if self._algorithm.kl_in == "reward" else None
        advantages = iter(self._advantages(batches, None if kl is None else [row for rows in kl for row in rows]))
        for index, batch in enumerate(batches):
            totals = self._train_batch(batch, list(islice(advantages, len(batch.responses))))
            if kl is not None:
                # Measured where it is taken from the reward: the loss knows no reference then.
                totals = replace(totals, kl=sum(float(kl[index][row].sum()) for row in self._trained(batch)))
            yield totals

    def _advantages(self, batches: Sequence[BatchRecord], kl: Sequence[Tensor] | None) -> list[Tensor]:
        """Of each response of the batches, [] or [its trained tokens], float64."""
        responses = [graded for batch in batches for graded in batch.responses]
        rewards = torch.tensor([graded.reward for graded in responses], dtype=torch.float64)
        lengths = torch.tensor([graded.length for graded in responses])
        trained = torch.zeros_like(lengths)
        kept = trained_responses([graded.finish_reason for graded in responses], self._algorithm)
        trained[kept] = lengths[kept]
        rewards = rewards + self._penalties(responses)
        return advantages_of(rewards, trained, self._plan.num_generations, self._algorithm, kl)

    def _penalties(self, responses: Sequence[GradedResponse]) -> Tensor:
        """What long responses cost, [B] float64, at most 0."""
        lengths = torch.tensor([graded.length for graded in responses])
        buffer = self._algorithm.overlong_buffer_length
        if buffer is None:
            return torch.zeros(len(responses), dtype=torch.float64)
        limit = self._plan.sampling.max_completion_length
        return overlong_penalties(lengths, limit, buffer, self._algorithm.overlong_penalty_factor)

    def _reference_kl(self, batch: BatchRecord) -> list[Tensor]:
        """With each token of each response, also of those that are not trained: they count in their group's mean."""
        policy, reference = self._learner.policy, self._learner.reference
        if reference is None:
            raise ValueError("kl_in: value 'reward'; allowed: 'loss' without a reference policy")
        temperature = self._plan.sampling.temperature
        return [
            row
            for _, collated in self._passes(batch, range(len(batch.responses)))
            for row in reference_kl(policy, reference, collated, self._algorithm, temperature=temperature)
        ]

    def _trained(self, batch: BatchRecord) -> list[int]:
        return trained_responses([graded.finish_reason for graded in batch.responses], self._algorithm)

    def _train_batch(self, batch: BatchRecord, advantages: Sequence[Tensor]) -> StepTotals:
        trained = self._trained(batch)
        log.info("micro-batch %d: %d responses", batch.number, len(trained))
        left_out = len(batch.responses) - len(trained)
        totals = [leave_out(self._learner.policy, left_out)] if left_out else []
        for part, collated in self._passes(batch, trained):
            rows = [advantages[index].to(torch.float32) for index in part]
            totals.append(
                accumulate(
                    self._learner.policy,
                    collated,
                    pad_sequence(rows, batch_first=True) if rows[0].dim() else torch.stack(rows),
                    self._algorithm,
                    temperature=self._plan.sampling.temperature,
                    max_completion_length=self._plan.sampling.max_completion_length,
                    reference=self._learner.reference if self._algorithm.kl_in == "loss" else None,
                )
            )
        return combined(totals)

    def _passes(self, batch: BatchRecord, indices: Sequence[int]) -> Iterator[tuple[list[int], TokenBatch]]:
        """The responses of a batch at `indices`, in forward passes: which ones, and their tokens."""
        if not indices:
            return
        tokens = {index: self._batches.tokens(batch.responses[index]) for index in indices}
        prompts = {
            i: self._prompts[each.response // self._plan.num_generations].token_ids for i, each in tokens.items()
        }
        lengths = [len(prompts[index]) + batch.responses[index].length for index in indices]
        for part in passes(lengths, self._tokens_max):
            chosen = [indices[position] for position in part]
            yield (
                chosen,
                collate(
                    [tokens[index].response for index in chosen],
                    [prompts[index] for index in chosen],
                    [tokens[index].token_ids.tolist() for index in chosen],
                    [tokens[index].logprobs.tolist() for index in chosen],
                ),
            )
