"""Opening an iteration's recorded batches: with the run's reward functions, tokenizer and settings."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from storage.clock import Clock
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord
from storage.stores.store import ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.grading.run_rewards import open_grader
from tasks.learning.journal_follower import FollowConfig
from tasks.learning.recorded_batches import RecordedBatches
from tasks.prompts.decode import open_completion_decoder
from tasks.turns.reading import message_reader


@contextmanager
def opened_batches(
    store: ObjectStore,
    plan: PlanRecord,
    config: RunConfig,
    prompts: Sequence[PromptRow],
    folder: Path,
    clock: Clock,
    watch: Callable[[bool], None],
    before_closing: Callable[[], None] = lambda: None,
) -> Iterator[RecordedBatches]:
    """The recorded batches of a plan within the block, in which the reward functions' processes live.

    folder: the run's model files. Other arguments are those of `RecordedBatches`. Raises GradingError if a function
    cannot be used.
    """
    grading = open_grader(store, config.rewards, config.trainer.device, turns=config.turns)
    with grading if config.rewards else nullcontext() as grader:
        yield RecordedBatches(
            store,
            plan,
            prompts=prompts,
            grader=grader,
            decode=open_completion_decoder(folder, plan.sampling),
            read_messages=message_reader(config.turns, plan, folder),
            follow=FollowConfig.of(config),
            tokens_max=config.trainer.micro_batch_tokens_max,
            clock=clock,
            watch=watch,
            before_closing=before_closing,
        )
