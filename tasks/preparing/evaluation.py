"""The work of an evaluation's planning task: choose the weight version, and write a plan without training."""

import logging
from collections.abc import Collection
from dataclasses import replace

from resources.pools import ControlPoolConfig
from storage.clock import Clock
from storage.digests import digest_of
from storage.errors import GleanerError
from storage.records import layout, model_files, prompt_table, records
from storage.records.evaluations import begun_evaluations, ended_evaluations, version_of
from storage.records.records import PlanRecord, RunRecord, SettingsRecord, SlotPlan
from storage.records.run import exists, read_plan, read_run
from storage.stores.connect import connect
from storage.stores.store import ConflictingRecord, ObjectMissing, ObjectStore, StoreUnavailable, commit
from storage.weights.stored_versions import list_versions
from tasks.configuration.evaluation import SEED, settings_digest
from tasks.configuration.iteration_config import settings_of
from tasks.configuration.references import PlanReference
from tasks.configuration.run_config import RunConfig, dump
from tasks.evaluation.held_out import draw_held_out, load_held_out
from tasks.evaluation.measure import (
    ITERATION,
    OWN_MODELS,
    deciding_settings,
    evaluation_of,
    rewards_of,
)
from tasks.grading.run_rewards import held_models, models_named, publish_models
from tasks.planning.division import assign_groups
from tasks.preparing.held_run import check_same_run
from tasks.preparing.local_inputs import LocalInputs, open_local_inputs
from tasks.preparing.started_slots import started_slots
from tasks.preparing.stop_tokens import stop_ids_of_run
from tasks.preparing.tools import model_tokenizer, openings, prompt_tokenizer, shown_tools
from tasks.prompts.draw import prompts_at
from tasks.reporting.last_failures import TaskSubject, keep

log = logging.getLogger(__name__)
DEFAULT_POOL = ControlPoolConfig()
NEWEST = -1


class VersionGone(GleanerError, LookupError):  # noqa: N818 - reads as what happened
    """The run does not hold the weight version to evaluate, or has deleted the version."""


def prepare(config: RunConfig, version: int, execution: str, clock: Clock) -> tuple[PlanReference, list[int]]:
    """Plan an evaluation, for the task plan_evaluation; version -1 is the newest.

    All checks of the input come before the first write. Raises ValueError and the errors of opening prompts and
    rewards, ConflictingRecord for the configuration of a different run, VersionGone, and StoreDenied if the
    evaluation's directory is a link.
    """
    config.pools.check_prices()
    run = connect(config.run.url)
    try:
        stored = read_run(run)
    except ObjectMissing:
        raise ValueError(f"run.url: value {config.run.url!r}; allowed: a run that training has begun") from None
    check_same_run(config, stored.config, run.url)
    if config.evaluation is None:
        log.warning(
            "not sure: evaluation: not given, so the prompts of training (data) are evaluated; none is held out"
        )
    version = published(run, version)
    with open_local_inputs(run) as inputs:
        return _prepare(run, stored, config, inputs, version, execution, clock)


def _prepare(
    run: ObjectStore,
    stored: RunRecord,
    config: RunConfig,
    inputs: LocalInputs,
    version: int,
    execution: str,
    clock: Clock,
) -> tuple[PlanReference, list[int]]:
    local, (rewards, prefix) = config, rewards_of(config)
    held = held_models(run, rewards, prefix)
    if config.evaluation is not None and config.evaluation.rewards and not held.issuperset(models_named(rewards)):
        own = inputs.rewards(config.evaluation.rewards, "evaluation.rewards")
        local = replace(config, evaluation=replace(config.evaluation, rewards=own))
    decided_by = settings_digest(deciding_settings(run, local))
    name = layout.evaluation_name(version, decided_by)
    url = layout.evaluation_url(config.run.url, name)
    reference = PlanReference(run_url=url, iteration=ITERATION, weight_version=version, execution=execution)
    if exists(run, layout.evaluation(name)):
        log.info("evaluation %s has ended already", name)
        return reference, []
    # The root of a store may be a link, but no link inside a run is followed, and the evaluation lies in the run.
    any(run.list(layout.evaluation_directory(name)))
    store = connect(url)
    if not exists(store, layout.plan(ITERATION)):
        evaluation = evaluation_of(local)
        section = "data" if config.evaluation is None else "evaluation.data"
        local = replace(local, evaluation=replace(evaluation, data=inputs.data(evaluation.data, section)))
        _write_plan(run, store, stored, config, local, version, decided_by, held, clock)
        # With the plan, retention keeps the version; an earlier deletion is noticed here.
        published(run, version)
    settings = SettingsRecord(config=settings_of(config, of_evaluation=True), execution=execution)
    records.put(store, layout.settings(ITERATION), settings)
    (slots,) = started_slots(store, read_plan(store, ITERATION), ["rollout"], execution, stands=False)
    return reference, slots


def prepare_beside(
    config: RunConfig, version: int, execution: str, clock: Clock, *, resume: bool
) -> tuple[PlanReference, list[int], list[PlanReference]]:
    """Plan the evaluation of a published version, if due, for the tasks `plan` and `conclude`.

    Returns the evaluation's reference, its slots, and the references to measure after the crew's end: one, or none. An
    evaluation is due if evaluation.interval divides `version` and the run still holds `version`: training does not
    wait for evaluations. Of all errors only StoreUnavailable is raised. Any further error is kept in the run as the
    evaluation's failure, and training goes on; the reference to measure then names the run alone, so the end of the
    execution counts the failure. resume: if no evaluation can begin for `version`, take an interrupted evaluation.
    """
    run_url = config.run.url
    none = PlanReference(run_url=run_url, iteration=ITERATION, weight_version=version, execution=execution)
    try:
        version = interrupted_version(config, version) if resume else version
        if not evaluation_of(config).is_due(version):
            return none, [], []
        reference, slots = prepare(config, version, execution, clock)
    except StoreUnavailable:
        raise
    except VersionGone as error:
        log.warning("left out: %s", error)
        return none, [], []
    except Exception as error:  # noqa: BLE001 - whatever it is, only the evaluation has failed
        log.warning("the evaluation of version %d cannot be planned: %s", version, error)
        work = TaskSubject(task="evaluation", run_url=run_url, execution=execution, iteration=version)
        keep(work, error, f"{type(error).__name__}: {error}")
        return none, [], [none]
    return reference, slots, [reference]


def interrupted_version(config: RunConfig, version: int) -> int:
    """The oldest due weight version with an evaluation that has begun but not ended; else `version`.

    `version` comes first if its evaluation can begin and has not begun: an interrupted evaluation can wait.
    """
    evaluation, run = evaluation_of(config), connect(config.run.url)
    decided_by = settings_digest(deciding_settings(run, config))
    name, begun = layout.evaluation_name(version, decided_by), begun_evaluations(run)
    held = list_versions(run, layout.WEIGHTS).complete
    if version in held and evaluation.is_due(version) and name not in {*begun, *ended_evaluations(run)}:
        return version
    versions = sorted(version_of(name) for name in begun if name.endswith(f"-{decided_by}"))
    return next((found for found in versions if found in held and evaluation.is_due(found)), version)


def published(run: ObjectStore, version: int) -> int:
    """The version (for NEWEST the newest) if held by the run; else raises VersionGone with the held versions."""
    if version != NEWEST and version >= 0 and exists(run, layout.manifest(layout.weights(version))):
        return version
    held = sorted(list_versions(run, layout.WEIGHTS).complete)
    if version == NEWEST and held:
        return held[-1]
    raise VersionGone(f"version: value {version}; {run.url} holds the weight versions {', '.join(map(str, held))}")


def _write_plan(
    run: ObjectStore,
    store: ObjectStore,
    stored: RunRecord,
    config: RunConfig,
    local: RunConfig,
    version: int,
    decided_by: str,
    held: Collection[str],
    clock: Clock,
) -> None:
    """Write prompts, identity and plan; losing the race to a second planner is no error, because both plans are equal.

    decided_by: the digest of the settings that decide the outcome. held: the reward models that the run holds.
    local: the configuration with local paths.
    """
    evaluation = evaluation_of(local)
    prompts = load_held_out(evaluation, config.rewards, held, turns=config.turns)
    with model_files.downloaded(run) as folder:
        added = openings(config, prompts_at(prompts, evaluation.data, 0, len(prompts)), SEED, ITERATION)
        tokenizer = prompt_tokenizer(config, folder, is_new=False)
        rows = draw_held_out(evaluation, prompts, tokenizer, config.rollout, folder, added)
        with_turns = config.turns is not None
        stop_ids = stop_ids_of_run(run, folder, model_tokenizer(tokenizer), rows, with_turns=with_turns)
    body = prompt_table.encode_prompts(rows)
    prompts_key = layout.prompts(ITERATION, digest_of(body))
    if not commit(store, prompts_key, body):
        raise ConflictingRecord(f"{prompts_key!r} holds other bytes than its name says")
    mine = RunRecord(
        config=dump(config),
        digest=decided_by,
        vocab_size=stored.vocab_size,
        model_files={},
        created_at_s=clock.wall(),
    )
    records.commit(store, layout.RUN, mine)
    publish_models(run, evaluation.rewards or (), OWN_MODELS)
    # With pools.rollout.count 0, training's responses come from elsewhere; an evaluation has no other pool.
    assignment = assign_groups(len(rows), max(1, config.pools.rollout.count))
    plan = PlanRecord(
        iteration=ITERATION,
        weight_version=version,
        run_seed=SEED,
        num_generations=evaluation.num_generations,
        prompts_key=prompts_key,
        first_prompt=0,
        slots=tuple(SlotPlan(slot=slot, pool="rollout", groups=groups) for slot, groups in enumerate(assignment)),
        sampling=evaluation.sampling.params(stop_ids),
        config=dump(config),
        created_at_s=clock.wall(),
        tools=shown_tools(tokenizer),
        weights_url="../..",
    )
    records.commit(store, layout.plan(ITERATION), plan)
