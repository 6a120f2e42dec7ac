"""Measures an evaluation: follows its journal, grades, verifies, and commits the record in the run it belongs to.

What an earlier attempt finished is not done again: recorded batches, a written record, a compacted journal.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from storage.clock import Clock
from storage.journal.assembly import JournalReader
from storage.journal.response_parts import parts_of_plan
from storage.journal.retention import settle
from storage.records import layout, model_files, records
from storage.records.evaluation_records import EvaluationRecord
from storage.records.prompt_table import PromptRow, read_prompts
from storage.records.records import BatchRecord, PlanRecord
from storage.records.run import connect_to_run, exists, read_plan
from storage.stores.store import ObjectStore, StorageError, StoreUnavailable
from tasks.configuration.evaluation import PASS_THRESHOLD, EvaluationConfig, settings, settings_digest
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.rewards import RewardConfig
from tasks.configuration.run_config import RunConfig
from tasks.evaluation.scores import evaluated_prompts, score_metrics
from tasks.grading.run_rewards import content_digests, open_grader
from tasks.learning.journal_follower import FollowConfig, GroupTimeout
from tasks.learning.recorded_batches import RecordedBatches, check_some_graded
from tasks.prompts.decode import open_completion_decoder
from tasks.reporting.conclusion import resume_metrics
from tasks.reporting.costs import crew_cost
from tasks.reporting.one_clock import in_order
from tasks.reporting.slot_lives import JournalTally, read_heartbeats, slot_lives, unannounced
from tasks.reporting.turns_tally import TurnsTally
from tasks.reporting.verification import IntegrityError, verified_parts
from tasks.sampling.session.crew_watch import CrewLost, CrewWatch
from tasks.turns.reading import message_reader

log = logging.getLogger(__name__)
# An evaluation's directory holds one iteration.
ITERATION = 0
# This prefixes the names of an evaluation's own reward models in the run; no reward's name can hold a "-".
OWN_MODELS = "evaluation-"


def measure(url: str, clock: Clock, execution: str = "") -> tuple[EvaluationRecord, bool]:
    """The record of the evaluation at `url`, and whether this call wrote it; its journal is compacted.

    If several processes measure at the same time, all return the first one's record. Raises GroupTimeout if the crew
    makes no progress, CrewLost if no process can finish, GradingError, IntegrityError, CorruptObject.
    """
    run_url, name = layout.evaluated(url)
    run, store = connect_to_run(run_url), connect_to_run(url)
    key = layout.evaluation(name)
    is_new = False
    if not exists(run, key):
        try:
            plan = read_plan(store, ITERATION)
            config = config_in_force(store, plan)
            record = _record(run, store, plan, config, execution, clock)
        except (StorageError, IntegrityError, GroupTimeout, CrewLost):
            # The process that commits the record deletes the journal that is read here.
            if not exists(run, key):
                raise
        else:
            is_new = records.commit(run, key, record)
    tidy(store)
    return records.read(run, EvaluationRecord, key), is_new


def tidy(store: ObjectStore) -> None:
    """Compact an ended evaluation and delete its journal; an error is logged, and the rest stays as it is."""
    try:
        plan = read_plan(store, ITERATION)
        if config_in_force(store, plan).retention.compact:
            settle(store, ITERATION)
    except StoreUnavailable:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not fail an evaluation whose record is written
        log.warning("not everything that is no longer needed was deleted: %s", error)


def _record(
    run: ObjectStore, store: ObjectStore, plan: PlanRecord, config: RunConfig, execution: str, clock: Clock
) -> EvaluationRecord:
    evaluation = evaluation_of(config)
    prompts = read_prompts(store, plan)
    batches = _grade(run, store, plan, config, prompts, execution, clock)
    recorded = [response for batch in batches for response in batch.responses]
    check_some_graded(plan, [response for response in recorded if response.reward is not None])
    reader = JournalReader(store, plan, parts=parts_of_plan(plan, recorded))
    reader.refresh()
    announced = [in_order(alive, plan.created_at_s) for alive in read_heartbeats(store, plan)]
    tally, turns = JournalTally(reader, recorded, (), announced), TurnsTally(reader, recorded)
    for part in verified_parts(plan, recorded, reader):
        tally.add(part)
        turns.add(part)
    lives = slot_lives([*announced, *unannounced(plan, announced, tally, clock.wall())], tally)
    scored = evaluated_prompts(recorded, [row.prompt_id for row in prompts], plan.num_generations, PASS_THRESHOLD)
    machines_s, usd = crew_cost(lives, {slot.pool: config.pools.rollout.price_usd_per_h for slot in plan.slots})
    now_s = clock.wall()
    decided_by = deciding_settings(run, config)
    return EvaluationRecord(
        weight_version=plan.weight_version,
        digest=settings_digest(decided_by),
        settings=decided_by,
        metrics={
            **score_metrics(scored, recorded, evaluation),
            **{f"val/{metric}": value for metric, value in (resume_metrics(lives) | turns.metrics()).items()},
            "val/timing_s/rollout_machines": machines_s,
            "val/cost/usd_rollout": usd,
            "val/reward_errors": float(sum(len(batch.reward_errors) for batch in batches)),
            "val/answers_given_up": float(sum(len(batch.given_up) for batch in batches)),
            "val/timing_s/evaluation": max(0.0, now_s - plan.created_at_s),
        },
        prompts=tuple(scored),
        created_at_s=now_s,
    )


def _grade(
    run: ObjectStore,
    store: ObjectStore,
    plan: PlanRecord,
    config: RunConfig,
    prompts: Sequence[PromptRow],
    execution: str,
    clock: Clock,
) -> list[BatchRecord]:
    """Grade and record every response as it ends; the iteration is then closed.

    The crew's map has ended, and no trainer generates: only members that join can produce missing responses.
    """
    watch = CrewWatch(store, plan, config.rollout, PlanningConfig(), clock, execution=execution, crew_ended=True)
    follow = replace(FollowConfig.of(config), in_plan_order=False)
    rewards, prefix = rewards_of(config)
    # This machine may differ from the trainer's.
    grading = open_grader(run, rewards, "auto", prefix, config.turns)
    with model_files.downloaded(run) as folder, grading as grader:
        return list(
            RecordedBatches(
                store,
                plan,
                prompts=prompts,
                grader=grader,
                decode=open_completion_decoder(folder, plan.sampling),
                read_messages=message_reader(config.turns, plan, folder),
                follow=follow,
                tokens_max=config.trainer.micro_batch_tokens_max,
                clock=clock,
                watch=watch.check,
            )
        )


def evaluation_of(config: RunConfig) -> EvaluationConfig:
    """The section `evaluation`; a run without the section evaluates the prompts and the sampling of its training."""
    if config.evaluation is None:
        # Every prompt of the source, whatever the run keeps of them.
        data = replace(config.data, from_=None, pass_rate=None, replay=None)
        return EvaluationConfig(data=data, sampling=config.sampling)
    return config.evaluation


def rewards_of(config: RunConfig) -> tuple[Sequence[RewardConfig], str]:
    """The rewards of the evaluation, and the prefix of their models' names in the run."""
    own = evaluation_of(config).rewards
    return (config.rewards, "") if own is None else (own, OWN_MODELS)


def deciding_settings(run: ObjectStore, config: RunConfig) -> dict[str, Any]:
    """The settings that decide the outcome, as JSON values; reads the reward models that the run does not hold."""
    rewards, prefix = rewards_of(config)
    return settings(evaluation_of(config), config.rewards, content_digests(run, rewards, prefix))
