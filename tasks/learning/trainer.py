"""The train step of an iteration: accumulate micro-batches as they are recorded; take optimizer steps.

A micro-batch is recorded before use and replayed from its record after a restart, so a killed trainer reaches the
result of an undisturbed trainer. The order of durable writes is: batches, training record, checkpoint, weights.
"""

import functools
import logging
import operator
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from resources.work_log import at_work
from storage.clock import Clock
from storage.records.prompt_table import PromptRow
from storage.records.records import BatchRecord, GradedResponse, PlanRecord, TrainingRecord
from storage.stores.store import ObjectStore
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.teacher import TeacherConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.awaited_scores import AwaitedScores
from tasks.learning.batching import TokenBatch, is_idle, mini_batches
from tasks.learning.critic import ValueTotals, accumulate_values, apply_values, take_part_in_values
from tasks.learning.distillation import TokenScores
from tasks.learning.estimates import Estimates, counted, estimate, first_logprobs, length_penalties, padded, trained
from tasks.learning.forward_passes import ForwardPasses
from tasks.learning.learner import CriticLearner, Learner
from tasks.learning.nonfinite import finite_together
from tasks.learning.ranks import Ranks
from tasks.learning.recorded_batches import Batches, BatchReader, check_some_graded
from tasks.learning.replayed_batches import ReplayReader
from tasks.learning.step import accumulate, apply, take_part
from tasks.learning.teacher_scoring import TeacherScoring
from tasks.learning.totals import StepTotals, combined, staleness_totals
from tasks.sampling.session.crew_watch import LeftAlone

log = logging.getLogger(__name__)
# Broadcast in place of a micro-batch's number when all ranks are to generate.
LEFT_ALONE = -1
Totals = TypeVar("Totals", StepTotals, ValueTotals)


class IterationTrainer:
    """Trains one iteration from its journal; `step` advances the learner by the iteration's optimizer steps."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        *,
        prompts: Sequence[PromptRow],
        learner: Learner,
        batches: Batches | None,
        algorithm: AlgorithmConfig,
        trainer: TrainerConfig,
        clock: Clock,
        started_at_s: float | None = None,
        same_engine: bool = True,
        reader: BatchReader | None = None,
        teacher: TeacherConfig | None = None,
    ) -> None:
        """Create the trainer of one rank.

        Args:
            store: The run's store.
            plan: The iteration's plan.
            prompts: The iteration's prompts, by group.
            learner: The models and optimizers that are trained.
            batches: The iteration's micro-batches on rank 0; None on other ranks, to which rank 0 broadcasts the
                numbers.
            algorithm: The run's algorithm.
            trainer: micro_batch_tokens_max is used.
            clock: The clock of the record's times.
            started_at_s: The start of the train phase, in seconds since 1970 UTC; None for now.
            same_engine: True if the sampler's log-probs are known to equal the trainer's (`tasks.learning.importance`).
            reader: Reads micro-batches and tokens on ranks without `batches`; None reads the journal.
            teacher: The run's teachers; None without.
        """
        self._plan = plan
        self._learner = learner
        self._algorithm = algorithm
        self._same_engine = same_engine
        self._ranks = learner.ranks
        self._clock = clock
        self._started_at_s = clock.wall() if started_at_s is None else started_at_s
        self._batches = batches
        own = BatchReader(store, plan) if reader is None else reader
        self._reader: BatchReader = own if batches is None else batches
        self._passes = ForwardPasses(
            self._reader,
            plan,
            prompts,
            trainer.micro_batch_tokens_max,
            self._ranks,
            packed=learner.is_packed,
            pairs=algorithm.learns_pairs,
        )
        self._scoring = None
        if teacher is not None:
            pooled = teacher.pool is not None and self._ranks.is_first
            awaited = AwaitedScores(store, plan, self._reader, teacher, trainer, clock) if pooled else None
            self._scoring = TeacherScoring(
                store,
                plan,
                prompts,
                self._reader,
                learner,
                teacher,
                trainer,
                awaited,
                is_replay=isinstance(self._reader, ReplayReader),
            )

    def step(self) -> TrainingRecord:
        """Train on every recorded group that is not filtered, and return the training record, not yet stored.

        The reward and the penalty of long responses are averaged over all graded responses, filtered or not. Examples
        have no reward.

        Raises NonFiniteGradient, CorruptObject, GradingError if every response failed, and the errors of `batches`.
        LeftAlone is raised on every rank; the learner must not be used afterwards.
        """
        recorded: list[BatchRecord] = []
        began_s = self._clock.monotonic()
        metrics = self._streamed(recorded) if self._algorithm.streams else self._in_steps(recorded)
        responses = [graded for batch in recorded for graded in batch.graded if graded.reward is not None]
        check_some_graded(self._plan, responses)
        if self._algorithm.overlong_buffer_length is not None:
            penalties = length_penalties(responses, self._algorithm, self._plan.sampling)
            metrics["overlong_penalty"] = float(penalties.mean())
        waited_s = 0.0 if self._batches is None else self._batches.waited_s
        waited_s += 0.0 if self._scoring is None else self._scoring.waited_s
        metrics["timing_s/wait"] = waited_s
        metrics["timing_s/compute"] = self._clock.monotonic() - began_s - waited_s
        ended_at_s = self._clock.wall()
        if self._plan.is_graded:
            metrics["reward"] = sum(graded.reward or 0.0 for graded in responses) / len(responses)
        return TrainingRecord(
            iteration=self._plan.iteration,
            weight_version=self._plan.iteration + 1,
            metrics=metrics,
            reward_errors=tuple(error for batch in recorded for error in batch.reward_errors),
            started_at_s=self._started_at_s,
            ended_at_s=ended_at_s,
        )

    def _in_turn(self) -> Iterator[BatchRecord]:
        """Yield the micro-batches of the first rank, on every rank."""
        if self._batches is None:
            while (number := self._ranks.broadcast()) is not None:
                if number == LEFT_ALONE:
                    raise LeftAlone("the first rank has found that no member lives")
                yield self._reader.read(number)
            return
        batches = iter(self._batches)
        while True:
            try:
                batch = next(batches, None)
            except LeftAlone:
                self._ranks.broadcast(LEFT_ALONE)
                raise
            self._ranks.broadcast(None if batch is None else batch.number)
            if batch is None:
                return
            yield batch

    def _streamed(self, recorded: list[BatchRecord]) -> dict[str, float]:
        """Take an optimizer step whose gradient is accumulated while micro-batches are being recorded."""
        totals = []
        for batch in self._in_turn():
            log.info("micro-batch %d: %d responses", batch.number, len(batch.responses))
            recorded.append(batch)
            if batch.responses:
                estimates = replace(self._estimate(batch.responses), teacher=self._scored(batch))
                totals.append(self._accumulate(batch.responses, estimates))
        if not totals:
            return self._nothing_to_train(recorded)
        return apply(self._learner.optimizer, combined(totals), self._algorithm)

    def _in_steps(self, recorded: list[BatchRecord]) -> dict[str, float]:
        """Record all micro-batches, then train on them: num_epochs times num_mini_batches optimizer steps."""
        scores: dict[int, TokenScores] = {}
        for batch in self._in_turn():
            recorded.append(batch)
            scores |= self._scored(batch) or {}
        responses = [graded for batch in recorded for graded in batch.responses]
        if not responses:
            return self._nothing_to_train(recorded)
        estimates = replace(self._estimate(responses), teacher=scores)
        groups = self._groups(responses)
        parts = mini_batches(groups, self._algorithm.num_mini_batches) * self._algorithm.num_epochs
        first, *later = [[graded for group in part for graded in group] for part in parts]
        after_first = estimates
        has_ratio = self._algorithm.old_logprobs == "trainer" and not self._algorithm.learns_examples
        if later and has_ratio and not self._critic_warms_up:
            again = {graded.response: graded for part in later for graded in part}
            kept = self._trained(list(again.values()))
            rows = first_logprobs(kept, self._learner, self._plan.sampling.temperature, self._passes)
            after_first = replace(estimates, first_logprobs=rows)
        # In the first step the ratio's denominator is the policy itself, whose own forward pass gives exactly 1.
        steps: list[dict[str, float]] = []
        at_work(
            "training", lambda: f"{len(steps)} of {len(parts)} optimizer steps; {len(recorded)} micro-batches recorded"
        )
        steps.append(self._optimizer_step(first, estimates))
        steps.extend(self._optimizer_step(part, after_first) for part in later)
        return step_metrics(steps, self._algorithm.num_epochs)

    def _nothing_to_train(self, recorded: Sequence[BatchRecord]) -> dict[str, float]:
        """The metrics of an iteration without a step, because every group is filtered."""
        totals = StepTotals(left_out=sum(len(batch.filtered) for batch in recorded))
        return apply(self._learner.optimizer, totals, self._algorithm)

    @property
    def _critic_warms_up(self) -> bool:
        critic = self._learner.critic
        return critic is not None and self._plan.counted < critic.warmup_iterations

    def _optimizer_step(self, responses: Sequence[GradedResponse], estimates: Estimates) -> dict[str, float]:
        """Take a step of the policy, unless the critic still warms up, and a step of the critic, if any."""
        critic, metrics = self._learner.critic, {}
        if not self._critic_warms_up:
            totals = self._accumulate(responses, estimates)
            metrics = apply(self._learner.optimizer, totals, self._algorithm)
        return metrics if critic is None else metrics | self._critic_step(critic, responses, estimates)

    def _critic_step(
        self, critic: CriticLearner, responses: Sequence[GradedResponse], estimates: Estimates
    ) -> dict[str, float]:
        """Take a step of the critic; no step without trained responses, because returns are then missing."""
        if estimates.values is None or estimates.returns is None:
            name = self._algorithm.advantage_estimator
            raise ValueError(f"critic: one is given; allowed: none, with advantage_estimator {name!r}")
        kept = self._trained(responses)
        totals = ValueTotals()
        for batch in self._passes(kept):
            with finite_together(self._ranks):
                if is_idle(batch):
                    take_part_in_values(critic.critic, batch)
                    continue
                values, returns = padded(estimates.values, batch), padded(estimates.returns, batch)
                totals += accumulate_values(critic.critic, batch, values, returns, self._algorithm.value_clip)
        if not kept:
            return {}
        totals = sum_over_ranks(totals, self._ranks)
        return apply_values(critic.optimizer, totals, tuple(graded.response for graded in kept))

    def _estimate(self, responses: Sequence[GradedResponse]) -> Estimates:
        sampling, generations = self._plan.sampling, self._plan.num_generations
        return estimate(responses, self._learner, self._algorithm, sampling, generations, self._passes)

    def _scored(self, batch: BatchRecord) -> dict[int, TokenScores] | None:
        """The teachers' scores of a micro-batch; None without a teacher. Every rank must call `_scored`."""
        return None if self._scoring is None else self._scoring(batch)

    def _trained(self, responses: Sequence[GradedResponse]) -> list[GradedResponse]:
        return trained(responses, self._algorithm, self._plan.num_generations)

    def _groups(self, responses: Sequence[GradedResponse]) -> list[Sequence[GradedResponse]]:
        size = self._plan.num_generations
        return [responses[start : start + size] for start in range(0, len(responses), size)]

    def _accumulate(self, responses: Sequence[GradedResponse], estimates: Estimates) -> StepTotals:
        """Add the gradient of these responses to the policy's."""
        kept, counting = self._trained(responses), sum(counted(responses, self._plan.num_generations))
        not_trained = StepTotals(left_out=counting - len(kept), uncounted=len(responses) - counting)
        totals = [not_trained if self._ranks.is_first else StepTotals()]
        for batch in self._passes(kept):
            with finite_together(self._ranks):
                totals.append(self._pass(batch, estimates))
        return sum_over_ranks(combined(totals), self._ranks)

    def _pass(self, batch: TokenBatch, estimates: Estimates) -> StepTotals:
        """Make a forward and a backward pass of this rank."""
        reference = self._learner.reference if self._algorithm.kl_in == "loss" else None
        temperature, first = self._plan.sampling.temperature, estimates.first_logprobs
        if is_idle(batch):
            take_part(self._learner.policy, batch, temperature=temperature, reference=reference)
            return StepTotals()
        totals = accumulate(
            self._learner.policy,
            batch,
            padded(estimates.advantages, batch),
            self._algorithm,
            temperature=temperature,
            max_completion_length=self._plan.sampling.max_completion_length,
            reference=reference,
            first_logprobs=None if first is None else padded(first, batch),
            same_engine=self._same_engine,
            taught=None if self._scoring is None else self._scoring.taught(batch, estimates.teacher or {}),
        )
        totals += staleness_totals(self._passes.weight_versions(batch), self._plan.iteration)
        if estimates.kl is not None:
            # With the KL in the reward, the loss has no reference, so the KL comes from the estimates.
            totals = replace(totals, kl=sum(float(estimates.kl[response].sum()) for response in batch.responses))
        return totals


def sum_over_ranks(totals: Totals, ranks: Ranks) -> Totals:
    """The sum of all ranks' totals, on every rank; every rank must call `sum_over_ranks`."""
    if ranks.world_size == 1:
        return totals
    found = [type(totals)(**_tuples(each)) for each in ranks.gather(asdict(totals))]
    return functools.reduce(operator.add, found)


def _tuples(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document from JSON, with lists turned into tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}


def step_metrics(steps: Sequence[Mapping[str, float]], num_epochs: int) -> dict[str, float]:
    """The metrics of an iteration from the metrics of its optimizer steps.

    Most metrics are means over steps, weighted by tokens; steps without tokens count only if no step has tokens.
    num_tokens is the number of one epoch, minima and maxima are over all steps, and learning rates are the last step's.
    """
    steps = [step for step in steps if step.get("num_tokens", 1.0)] or steps
    names = dict.fromkeys(name for step in steps for name in step)
    metrics = {}
    for name in names:
        having = [step for step in steps if name in step]
        values = [step[name] for step in having]
        if name == "num_tokens":
            metrics[name] = sum(values) / num_epochs
        elif name.endswith(("ratio_max", "staleness_max")):
            metrics[name] = max(values)
        elif name.endswith("ratio_min"):
            metrics[name] = min(values)
        else:
            weights = [step.get("num_tokens", 1.0) or 1.0 for step in having]
            metrics[name] = values[-1] if name.endswith("/lr") else statistics.fmean(values, weights)
    return metrics
