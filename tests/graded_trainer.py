"""A trainer of one iteration that grades what it trains on, as the train task puts it together."""

from collections.abc import Callable, Sequence
from typing import Any

from storage.clock import Clock
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord
from storage.stores.store import ObjectStore
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.rollout import RolloutConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.grading.grader import Grader
from tasks.learning.journal_follower import FollowConfig
from tasks.learning.learner import Learner
from tasks.learning.recorded_batches import RecordedBatches
from tasks.learning.trainer import IterationTrainer
from tasks.turns.reading import ReadMessages


def graded_trainer(
    store: ObjectStore,
    plan: PlanRecord,
    *,
    prompts: Sequence[PromptRow],
    learner: Learner,
    grader: Grader | None,
    decode: Callable[[Sequence[int]], str],
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
    clock: Clock,
    read_messages: ReadMessages | None = None,
    **settings: Any,
) -> IterationTrainer:
    """A trainer whose micro-batches are recorded by itself; `settings` are IterationTrainer's."""
    batches = RecordedBatches(
        store,
        plan,
        prompts=prompts,
        grader=grader,
        decode=decode,
        read_messages=read_messages,
        follow=FollowConfig(
            in_plan_order=algorithm.in_plan_order(exact_engine=True),
            timeout_s=trainer.group_timeout_s,
            poll_interval_s=RolloutConfig().poll_interval_s,
            flush_interval_s=RolloutConfig().flush_interval_s,
        ),
        tokens_max=trainer.micro_batch_tokens_max,
        clock=clock,
    )
    return IterationTrainer(
        store,
        plan,
        prompts=prompts,
        learner=learner,
        batches=batches,
        algorithm=algorithm,
        trainer=trainer,
        clock=clock,
        **settings,
    )
