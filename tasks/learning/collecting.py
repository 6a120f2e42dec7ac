"""Collecting: an iteration's groups are followed, graded and recorded on a machine without a GPU, before training.

The train task then replays what is recorded and records the rest itself, so reserved machines are held for little more
than the train phase. What is learned is the same: a micro-batch is used as it is recorded, by whichever task.
"""

import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path

from storage import layout, model_files, prompt_table, records
from storage.clock import Clock
from storage.collected import CollectedRecord
from storage.metered import MeteredStore
from storage.records import PlanRecord
from storage.run import connect_to_run, exists, read_config, read_plan
from storage.store import ObjectStore
from tasks.configuration.run_config import RunConfig, parse
from tasks.grading.run_rewards import open_grader
from tasks.learning.follow import FollowConfig
from tasks.learning.lease import keep_lease
from tasks.learning.recorded_batches import RecordedBatches
from tasks.prompts.decode import open_decoder
from tasks.sampling.session.crew_watch import CrewWatch

log = logging.getLogger(__name__)


def collect(run_url: str, iteration: int, execution: str, clock: Clock) -> None:
    """Record groups until the iteration's train phase is due, which is when `phase_start_share` of them are recorded.

    Raises what following and grading raise: GroupTimeout, GradingError, CrewLost, CorruptObject and StoreUnavailable.
    """
    began_s = clock.monotonic()
    store = MeteredStore(connect_to_run(run_url))
    # After either of these nothing is left to record.
    if any(exists(store, key) for key in (layout.closed(iteration), layout.report(iteration))):
        return
    plan = read_plan(store, iteration)
    config = parse(read_config(store, plan), f"the configuration of iteration {iteration}")
    with keep_lease(store, execution, config.run.lease_ttl_s, clock):
        _record(store, plan, config, execution, clock)
    spent = CollectedRecord(
        iteration=iteration,
        seconds=clock.monotonic() - began_s,
        puts=store.requests.puts,
        gets=store.requests.gets,
    )
    records.commit(store, layout.collected(iteration), spent)


def _record(store: ObjectStore, plan: PlanRecord, config: RunConfig, execution: str, clock: Clock) -> None:
    watch = CrewWatch(store, plan, config.rollout, config.planning, clock, execution=execution)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gleaner-model-")))
        model_files.download(store, folder)
        batches = RecordedBatches(
            store,
            plan,
            prompts=prompt_table.read_prompts(store, plan),
            grader=stack.enter_context(open_grader(store, config.rewards, config.trainer.device)),
            decode=open_decoder(folder),
            follow=FollowConfig.of(config.algorithm, config.trainer),
            tokens_max=config.trainer.micro_batch_tokens_max,
            clock=clock,
            watch=watch.check,
        )
        for _ in batches:
            if batches.share_recorded >= config.phase_start_share:
                break
    log.info("iteration %d: %.0f %% of the groups are recorded", plan.iteration, 100 * batches.share_recorded)
