"""The train step of an iteration: follow the journal, grade, record and accumulate micro-batches, step, publish.

A micro-batch is recorded before it is used and replayed from its record after a restart, so a killed trainer ends
where an undisturbed one does. Order of durable writes: batches, training record, checkpoint, weights.
"""

import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from storage.clock import Clock
from storage.prompt_table import PromptRow
from storage.records import BatchRecord, GradedResponse, PlanRecord, TrainingRecord
from storage.store import ObjectStore
from tasks.grading.grader import Grader
from tasks.learning.advantage import needs_whole_batch
from tasks.learning.batching import TokenBatch, collate, passes
from tasks.learning.config import AlgorithmConfig, TrainerConfig
from tasks.learning.estimates import Estimates, estimate, first_logprobs, length_penalties, padded, trained
from tasks.learning.follow import FollowConfig
from tasks.learning.learner import CriticLearner, Learner
from tasks.learning.mini_batches import mini_batches
from tasks.learning.recorded_batches import RecordedBatches
from tasks.learning.staleness import staleness_totals
from tasks.learning.step import accumulate, apply, leave_out
from tasks.learning.totals import StepTotals, combined
from tasks.learning.value_step import ValueTotals, accumulate_values, apply_values

log = logging.getLogger(__name__)


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
        same_engine: bool = True,
    ) -> None:
        """same_engine: the sampler is known to compute as the trainer does (`tasks.learning.importance`)."""
        self._plan = plan
        self._prompts = prompts
        self._learner = learner
        self._algorithm = algorithm
        self._same_engine = same_engine
        self._staleness: dict[int, StepTotals] = {}
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
        """Train on every group that is recorded and not filtered; what was measured, not yet stored.

        The reward, and the penalty of long responses, are measured over all graded responses, filtered or not.

        Raises GroupTimeout, GradingError, NonFiniteGradient or CorruptObject; the learner is not to be used then.
        """
        recorded: list[BatchRecord] = []
        metrics = self._streamed(recorded) if self._streams else self._in_steps(recorded)
        responses = [graded for batch in recorded for graded in batch.graded]
        if self._algorithm.overlong_buffer_length is not None:
            penalties = length_penalties(responses, self._algorithm, self._plan.sampling)
            metrics["overlong_penalty"] = float(penalties.mean())
        ended_at_s = self._clock.wall()
        return TrainingRecord(
            iteration=self._plan.iteration,
            weight_version=self._plan.iteration + 1,
            metrics={**metrics, "reward": sum(graded.reward for graded in responses) / len(responses)},
            reward_errors=tuple(error for batch in recorded for error in batch.reward_errors),
            started_at_s=self._started_at_s,
            ended_at_s=ended_at_s,
        )

    @property
    def _streams(self) -> bool:
        """Whether the gradient can be accumulated while other responses are still generated."""
        one_step = self._algorithm.num_mini_batches * self._algorithm.num_epochs == 1
        return one_step and not needs_whole_batch(self._algorithm)

    def _streamed(self, recorded: list[BatchRecord]) -> dict[str, float]:
        """One optimizer step, whose micro-batches are trained as they are recorded."""
        totals = []
        for batch in self._batches:
            log.info("micro-batch %d: %d responses", batch.number, len(batch.responses))
            recorded.append(batch)
            if batch.responses:
                totals.append(self._accumulate(batch.responses, self._estimate(batch.responses)))
        if not totals:
            return self._step_without_gradient(recorded)
        return apply(self._learner.optimizer, combined(totals), self._algorithm)

    def _in_steps(self, recorded: list[BatchRecord]) -> dict[str, float]:
        """Record all micro-batches, then train on them: num_epochs times num_mini_batches optimizer steps."""
        recorded += self._batches
        responses = [graded for batch in recorded for graded in batch.responses]
        if not responses:
            return self._step_without_gradient(recorded)
        estimates = self._estimate(responses)
        groups = self._groups(responses)
        parts = mini_batches(groups, self._algorithm.num_mini_batches) * self._algorithm.num_epochs
        if len(parts) > 1 and self._algorithm.old_logprobs == "trainer":
            kept = trained(responses, self._algorithm)
            rows = first_logprobs(kept, self._learner, self._plan.sampling.temperature, self._passes)
            estimates = replace(estimates, first_logprobs=rows)
        steps = [self._optimizer_step([graded for group in part for graded in group], estimates) for part in parts]
        return step_metrics(steps, self._algorithm.num_epochs)

    def _step_without_gradient(self, recorded: Sequence[BatchRecord]) -> dict[str, float]:
        """The one optimizer step of an iteration whose groups are all filtered."""
        totals = leave_out(self._learner.policy, sum(len(batch.filtered) for batch in recorded))
        return apply(self._learner.optimizer, totals, self._algorithm)

    def _optimizer_step(self, responses: Sequence[GradedResponse], estimates: Estimates) -> dict[str, float]:
        """Of the policy, unless the critic still warms up, and of the critic, if there is one."""
        critic, metrics = self._learner.critic, {}
        if critic is None or self._plan.iteration >= critic.warmup_iterations:
            totals = self._accumulate(responses, estimates)
            metrics = apply(self._learner.optimizer, totals, self._algorithm)
        return metrics if critic is None else metrics | self._critic_step(critic, responses, estimates)

    def _critic_step(
        self, critic: CriticLearner, responses: Sequence[GradedResponse], estimates: Estimates
    ) -> dict[str, float]:
        """Nothing when no response is trained: then there are no returns."""
        if estimates.values is None or estimates.returns is None:
            raise ValueError("critic: one is given; allowed: none, with an advantage_estimator other than 'gae'")
        kept = trained(responses, self._algorithm)
        totals = ValueTotals()
        for batch in self._passes(kept):
            values, returns = padded(estimates.values, batch), padded(estimates.returns, batch)
            totals += accumulate_values(critic.critic, batch, values, returns, self._algorithm.value_clip)
        if not kept:
            return {}
        return apply_values(critic.optimizer, totals, tuple(graded.response for graded in kept))

    def _estimate(self, responses: Sequence[GradedResponse]) -> Estimates:
        sampling, generations = self._plan.sampling, self._plan.num_generations
        return estimate(responses, self._learner, self._algorithm, sampling, generations, self._passes)

    def _groups(self, responses: Sequence[GradedResponse]) -> list[Sequence[GradedResponse]]:
        size = self._plan.num_generations
        return [responses[start : start + size] for start in range(0, len(responses), size)]

    def _accumulate(self, responses: Sequence[GradedResponse], estimates: Estimates) -> StepTotals:
        """Add the gradient of responses to the policy's."""
        kept = trained(responses, self._algorithm)
        left_out = len(responses) - len(kept)
        totals = [leave_out(self._learner.policy, left_out)] if left_out else []
        first = estimates.first_logprobs
        for batch in self._passes(kept):
            part = accumulate(
                self._learner.policy,
                batch,
                padded(estimates.advantages, batch),
                self._algorithm,
                temperature=self._plan.sampling.temperature,
                max_completion_length=self._plan.sampling.max_completion_length,
                reference=self._learner.reference if self._algorithm.kl_in == "loss" else None,
                first_logprobs=None if first is None else padded(first, batch),
                same_engine=self._same_engine,
            )
            part = combined([part, *(self._staleness[response] for response in batch.responses)])
            if estimates.kl is not None:
                # Measured where it is taken from the reward: the loss knows no reference then.
                part = replace(part, kl=sum(float(estimates.kl[response].sum()) for response in batch.responses))
            totals.append(part)
        return combined(totals)

    def _passes(self, responses: Sequence[GradedResponse]) -> Iterator[TokenBatch]:
        """Responses in forward passes."""
        if not responses:
            return
        tokens = [self._batches.tokens(graded) for graded in responses]
        policy_version = self._plan.iteration
        self._staleness |= {each.response: staleness_totals(each.weight_versions, policy_version) for each in tokens}
        prompts = [self._prompts[graded.response // self._plan.num_generations].token_ids for graded in responses]
        lengths = [len(prompt) + graded.length for prompt, graded in zip(prompts, responses, strict=True)]
        for part in passes(lengths, self._tokens_max):
            yield collate(
                [tokens[index].response for index in part],
                [prompts[index] for index in part],
                [tokens[index].token_ids.tolist() for index in part],
                [tokens[index].logprobs.tolist() for index in part],
            )


def step_metrics(steps: Sequence[Mapping[str, float]], num_epochs: int) -> dict[str, float]:
    """The metrics of an iteration from those of its optimizer steps: their mean, except for what is counted or bounds.

    num_tokens are those of one epoch, minima and maxima are of all steps, learning rates are the last.
    """
    names = dict.fromkeys(name for step in steps for name in step)
    metrics = {}
    for name in names:
        values = [step[name] for step in steps if name in step]
        if name == "num_tokens":
            metrics[name] = sum(values) / num_epochs
        elif name.endswith(("ratio_max", "staleness_max")):
            metrics[name] = max(values)
        elif name.endswith("ratio_min"):
            metrics[name] = min(values)
        else:
            metrics[name] = values[-1] if name.endswith("/lr") else statistics.fmean(values)
    return metrics
