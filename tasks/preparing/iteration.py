"""The work of the plan task: check everything, open the run, and write the next iteration's plan."""

import logging
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path

from resources.granted import check_granted
from resources.model_config import model_fields
from resources.work_log import at_work
from storage.clock import Clock
from storage.errors import GleanerError
from storage.fleet.nesting import FLEET, check_own_place
from storage.process_identity import has_ended, number_here
from storage.records import layout, model_files, records
from storage.records.fitness import probe
from storage.records.records import PlanRecord, RunRecord, SettingsRecord
from storage.records.run import (
    RunBusy,
    acquire_lease,
    exists,
    holds_run,
    next_iteration,
    open_run,
    published_version,
    read_plan,
    release_lease,
)
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from tasks.configuration.iteration_config import settings_of
from tasks.configuration.references import PlanReference
from tasks.configuration.run_config import RunConfig, changes, digest, dump, parse_held
from tasks.configuration.teacher import TeacherConfig
from tasks.grading.grader import check_rewards
from tasks.grading.run_rewards import held_models
from tasks.learning.pretrained import vocabulary_size
from tasks.planning.iteration_plan import BudgetExceeded
from tasks.preparing.adapter_fit import check_targets
from tasks.preparing.checks import check_settings, draw
from tasks.preparing.draft_model_check import check_draft_model, lacks_draft_model, publish_draft_model
from tasks.preparing.engine_fit import EngineMisfit, check_engine_fits
from tasks.preparing.example_journal import Responses, check_examples, responses_of, write_examples
from tasks.preparing.first_weights import model_directory_of_run, origin_of, publish_first, with_local_inputs
from tasks.preparing.known_evaluation import doubts_of_evaluation
from tasks.preparing.known_prompts import Known, known_prompts
from tasks.preparing.local_inputs import LocalInputs, open_local_inputs
from tasks.preparing.model_check import check_model_use
from tasks.preparing.needed_state import check_needed_state
from tasks.preparing.origin import Origin, position
from tasks.preparing.replayed_groups import NOTHING, Replayed, choose_replayed, write_replayed
from tasks.preparing.started_slots import started_slots
from tasks.preparing.stop_tokens import look_at_responses, stop_ids_of_run
from tasks.preparing.teacher_check import check_teachers
from tasks.preparing.tools import compared, model_tokenizer, openings, prompt_tokenizer, shown_tools
from tasks.preparing.trainer_fit import TrainerMisfit, check_trainer_fits
from tasks.preparing.vain_settings import settings_in_vain
from tasks.preparing.written_plan import draw_rows, write_plan
from tasks.prompts.draw import prompts_at
from tasks.prompts.loading import doubts_of, load_prompts
from tasks.prompts.prompt import PromptSet
from tasks.prompts.tokenise import Tokenizer
from tasks.sharing.membership import admit_alone, check_admitted

log = logging.getLogger(__name__)


class WeightsTooOld(GleanerError, LookupError):  # noqa: N818 - reads as what happened
    """No allowed weight version is published yet; a later attempt may find a version."""


def _check_before_anything(config: RunConfig) -> None:
    check_settings(config)
    config.algorithm.estimator.check(with_turns=config.turns is not None)
    config.algorithm.loss.check()
    check_admitted(config)


def _place_of(url: str) -> tuple[ObjectStore, bool]:
    """The store of a run, and whether the run is new. A new run may neither lie in a fleet nor contain a fleet."""
    store = connect(url)
    is_new = not holds_run(store)
    if is_new:
        check_own_place("run.url", url, store, [FLEET])
    return store, is_new


def _check_model(store: ObjectStore, config: RunConfig, local: RunConfig, model_dir: Path, *, is_new: bool) -> None:
    """Refuse a model that engine or trainer cannot hold; for a new run also a model that neither can use.

    local: with local paths, of which a teacher's is passed over where the directory is gone and the run has a copy. A
    draft model that the run lacks is tried, too; the memory of one that the run holds is only doubted.
    """
    lacks_draft, drafting = lacks_draft_model(store, config.rollout.speculation), local.rollout.speculation
    try:
        doubts = check_engine_fits(config, model_dir, drafting.drafting_model)
    except EngineMisfit as error:
        if is_new or lacks_draft:
            raise
        # The run may have generated with the draft model already: responses are rarely all of the longest length.
        doubts = [*check_engine_fits(config, model_dir, None), str(error)]
    try:
        doubts += check_trainer_fits(config, model_dir, local.teacher)
    except TrainerMisfit as error:
        if is_new:
            raise
        # The size is an estimate, and the run may have trained with the settings already.
        doubts.append(str(error))
    if is_new:
        check_targets(config, model_dir, model_fields(model_dir))
        doubts += check_model_use(config, model_dir).doubts
    if lacks_draft:
        doubts += check_draft_model(config, drafting, model_dir)
    _warn(doubts)


def _load(store: ObjectStore, local: RunConfig, *, is_new: bool) -> tuple[PromptSet, Known | None]:
    """The prompts of the run, and what another run knows of the prompts."""
    source = load_prompts(local.data, check_rows=is_new, kind=local.algorithm.kind)
    known = known_prompts(store, local, source)
    return (source if known is None else known.kept(source)), known


def _check_prompts(
    config: RunConfig, teacher: TeacherConfig | None, prompts: PromptSet, tokenizer: Tokenizer, model_dir: Path
) -> None:
    """Tokenise every prompt once, before the run exists; open the first environment; try the teachers (local paths)."""
    rows = draw(config, prompts, tokenizer, model_dir, first=0, count=len(prompts))
    _warn(compared(rows, prompts, tokenizer, model_dir, config.data))
    first = openings(config, prompts_at(prompts, config.data, 0, 1), config.run.seed, 0)
    draw(config, prompts, tokenizer, model_dir, first=0, count=1, openings=first)
    _, doubts = look_at_responses(config, model_dir, model_tokenizer(tokenizer), prompts)
    _warn([*doubts_of(prompts), *doubts])
    if config.algorithm.learns_examples:
        _warn(check_examples(config, rows, prompts, tokenizer, model_dir)[1])
    if teacher is not None:
        _warn(check_teachers(config, teacher, model_dir, prompts))


def _check_rewards(local: RunConfig, prompts: PromptSet, held: set[str], *, is_new: bool) -> None:
    """Refuse rewards that cannot be used; local: with local paths of inputs."""
    if local.rewards:
        _warn(check_rewards(local.rewards, prompts.columns, held, prompts, is_new=is_new, turns=local.turns))


def _stop_ids(
    store: ObjectStore, config: RunConfig, prompts: PromptSet, tokenizer: Tokenizer, model_dir: Path
) -> tuple[int, ...]:
    given, with_turns = model_tokenizer(tokenizer), config.turns is not None
    return stop_ids_of_run(store, model_dir, given, prompts, with_turns=with_turns)


def _warn(doubts: Iterable[str]) -> None:
    for doubt in doubts:
        log.warning("not sure: %s", doubt)


def prepare(
    config: RunConfig,
    execution: str,
    clock: Clock,
    *,
    ahead: int = 0,
    pools: Sequence[str] = (),
    ends_execution: bool = False,
    submitted: PromptSet | None = None,
) -> tuple[PlanReference, list[list[int]]]:
    """Plan the next iteration; returns the plan's reference and its `started_slots`.

    pools: () means the configured pools. ends_execution: the iteration is the last of the execution. submitted: the
    iteration's prompts, one per group, where a program gives them.

    Raises WeightsTooOld if the iteration may not begin yet; CorruptObject or ObjectMissing if its state is not stored;
    ConcludedByAnother, after which a later attempt goes on with the run; and BudgetExceeded, with the lease released,
    unless an earlier iteration is under way, which is then returned again, without slots, to finish.
    """
    pools = pools or tuple(config.pools.rollout_pools)
    at_work("checking the configuration, the model and the prompts")
    _check_before_anything(config)
    store, is_new = _place_of(config.run.url)
    held = held_models(store, config.rewards)
    with open_local_inputs(None if is_new else store) as inputs:
        origin = origin_of(store, config)
        local = with_local_inputs(store, config, inputs, held, origin)
        _check_machine(local, is_new)
        prompts, known = (submitted, None) if submitted else _load(store, local, is_new=is_new)
        _check_rewards(local, prompts, held, is_new=is_new)
        model_dir = model_directory_of_run(store, local, inputs.folder)
        _check_model(store, config, local, model_dir, is_new=is_new)
        tokenizer = cache(partial(prompt_tokenizer, config, model_dir, is_new=is_new))
        if is_new:
            _warn(settings_in_vain(config))
            _check_prompts(config, local.teacher, prompts, tokenizer(), model_dir)
        _warn(doubts_of_evaluation(store, local, inputs, model_dir, tokenizer, is_new=is_new))
        if is_new:
            probe(store)
        run = _open(store, config, model_dir, execution, clock, inputs if is_new else None, origin, known)
        first_open = next_iteration(store)
        at_work("planning")
        iteration = passing_over(store, first_open, ahead)
        is_ahead = iteration > first_open
        check_needed_state(store, config, first_open, execution)
        publish_draft_model(store, config.rollout.speculation, local.rollout.speculation)
        replayed = NOTHING
        if not exists(store, layout.plan(iteration)):
            # A committed iteration has published the version at its end.
            version = sampled_version(store, iteration, config.algorithm.max_staleness) if is_ahead else iteration
            given = prompts, tokenizer(), model_dir, bool(submitted)
            try:
                replayed = _plan_one(store, config, local, run, origin, iteration, version, *given, clock)
            except BudgetExceeded as error:
                if not is_ahead:
                    release_lease(store, execution)
                    raise
                log.warning("iteration %d is not planned; iteration %d is completed: %s", iteration, first_open, error)
                return _reference(config, read_plan(store, first_open), execution), [[] for _ in pools]
        written = read_plan(store, iteration)
        _write_stored(store, written, config, responses_of(config, prompts, tokenizer, model_dir), replayed, clock)
    settings = SettingsRecord(config=settings_of(config), execution=execution, ends_execution=ends_execution)
    records.put(store, layout.settings(iteration), settings)
    log.info("iteration %d: weight version %d, %d slots", iteration, written.weight_version, len(written.slots))
    slots = started_slots(store, written, pools, execution, stands=config.rollout.crew == "standing")
    return _reference(config, written, execution), slots


def _plan_one(
    store: ObjectStore,
    config: RunConfig,
    local: RunConfig,
    run: RunRecord,
    origin: Origin | None,
    iteration: int,
    version: int,
    prompts: PromptSet,
    tokenizer: Tokenizer,
    model_dir: Path,
    is_submitted: bool,
    clock: Clock,
) -> Replayed:
    """Write the plan of an iteration that samples from `version`; returns its groups of other runs.

    The other runs are read and verified before the iteration's first write. Raises BudgetExceeded and ReplayError.
    """
    behind, first = position(store, run, iteration)
    replayed = choose_replayed(config, behind + iteration, model_dir, prompts.columns)
    rows = draw_rows(config, prompts, tokenizer, model_dir, None if is_submitted else first, behind + iteration)
    if iteration == 0:
        publish_first(store, model_dir, local, origin)
    tools, stops = shown_tools(tokenizer), _stop_ids(store, config, prompts, tokenizer, model_dir)
    size = 0 if is_submitted else len(prompts)
    write_plan(store, config, rows, iteration, version, first, stops, clock, tools, size, behind, replayed)
    return replayed


def _open(
    store: ObjectStore,
    config: RunConfig,
    model_dir: Path,
    execution: str,
    clock: Clock,
    inputs: LocalInputs | None,
    origin: Origin | None,
    known: Known | None,
) -> RunRecord:
    """Create the run, or compare the stored run with the configuration; then take the lease.

    A run with a standing trainer is also admitted to a fleet of its own, where the trainer finds the run. inputs: the
    local inputs of a new run; None for an existing run. origin: the version of another run that is still to be copied.
    known: what another run knows of the prompts.
    """
    at_work("opening the run, and taking its lease")
    # The files come before run.json, which names the files: an existing run has its model files.
    files = model_files.upload(store, model_dir) if inputs else model_files.describe(model_dir)
    run = open_run(
        store,
        config=dump(config),
        digest=digest(config),
        vocab_size=vocabulary_size(model_dir),
        model_files=files,
        clock=clock,
        explain=lambda stored: changes(config, parse_held(stored)),
        sources=inputs.store_found(store) if inputs else None,
        origin=None if origin is None else origin.record,
        prompts_origin=known.save(store) if known and inputs else None,
    )
    acquire_lease(store, execution, config.run.lease_ttl_s, clock, known_dead=partial(is_dead_holder, store.url))
    admit_alone(config, clock)
    return run


def is_dead_holder(url: str, holder: str) -> bool:
    """Whether the lease's holder has ended; raises RunBusy, instead of a wait, for a living holder on this machine."""
    number = number_here(holder)
    if number is not None:
        raise RunBusy(
            f"{url} is being advanced by process {number} of this machine; give the command again when that process "
            "has ended"
        )
    return has_ended(holder)


def _check_machine(config: RunConfig, is_new: bool) -> None:
    """In a pod, log the granted resources; raises MachineTooSmall if the model of a new run does not fit."""

    def model_bytes() -> int:
        # A missing model is found out later.
        files = Path(config.policy.path).expanduser().glob("*.safetensors") if is_new else ()
        return sum(file.stat().st_size for file in files)

    pool = config.pools.control
    check_granted(f"plan of {config.run.url}", "control", pool, model_bytes, "the model, which the first plan reads,")


def to_train(config: RunConfig, planned: PlanReference) -> PlanReference:
    """The first uncommitted iteration, for the execution that has `planned`."""
    store = connect(config.run.url)
    return _reference(config, read_plan(store, next_iteration(store)), planned.execution)


def passing_over(store: ObjectStore, iteration: int, ahead: int) -> int:
    """The first iteration from `iteration` on without a plan, but at most `iteration` + `ahead`."""
    passed = 0
    while passed < ahead and exists(store, layout.plan(iteration)):
        iteration, passed = iteration + 1, passed + 1
    return iteration


def _write_stored(
    store: ObjectStore, plan: PlanRecord, config: RunConfig, responses: Responses, replayed: Replayed, clock: Clock
) -> None:
    """Write the responses of a plan that a data set has, or other runs, unless an earlier attempt has."""
    if config.algorithm.learns_examples:
        write_examples(store, plan, responses, clock)
    write_replayed(store, plan, replayed, clock)


def _reference(config: RunConfig, written: PlanRecord, execution: str) -> PlanReference:
    return PlanReference(
        run_url=config.run.url,
        iteration=written.iteration,
        weight_version=written.weight_version,
        execution=execution,
    )


def sampled_version(store: ObjectStore, iteration: int, max_staleness: int) -> int:
    """The weight version from which an iteration samples: the newest published version up to the iteration's own.

    Raises WeightsTooOld without a published version of at most `max_staleness` below the iteration's own.
    """
    version = published_version(store, iteration, iteration - max_staleness)
    if version is None:
        raise WeightsTooOld(
            f"iteration {iteration}: no weight version from {max(0, iteration - max_staleness)} on is published; "
            f"allowed with algorithm.max_staleness {max_staleness}: {max_staleness} older than the iteration at most"
        )
    return version
