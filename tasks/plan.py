"""The plan task: check everything, open the run, and write the next iteration's plan."""

import logging
import os
import socket
import tempfile
from pathlib import Path

from flytekit import current_context, task
from flytekit.exceptions.user import FlyteRecoverableException

from storage import layout, model_files, prompt_table, records
from storage.clock import Clock, SystemClock
from storage.connect import connect
from storage.framing import digest as bytes_digest
from storage.probe import probe
from storage.prompt_table import PromptRow
from storage.records import PlanRecord, SettingsRecord, SlotPlan
from storage.run import acquire_lease, exists, next_iteration, open_run, read_plan, read_report
from storage.store import ConflictingRecord, ObjectStore, StoreUnavailable, commit
from storage.weights import publish
from tasks.configuration.references import PlanReference
from tasks.configuration.run_config import RunConfig, differences, digest, dump, identity, parse
from tasks.grading.grader import Grader
from tasks.learning.pretrained import ModelError, check_model, read_tensors, stop_token_ids, vocabulary_size
from tasks.planning.plan import assign_groups
from tasks.prompts.draw import draw_prompts
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptSet
from tasks.prompts.tokenise import Tokenizer
from tasks.sampling.choose import context_length

log = logging.getLogger(__name__)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@task(retries=2)
def plan(config: dict, after: int) -> tuple[PlanReference, list[int]]:  # type: ignore[type-arg]
    """Write the next iteration's plan, or find the one an earlier attempt wrote; its reference and its slots.

    Everything that can be wrong with the input is found here, before a GPU is paid for and before anything is created.
    `after` only orders this task behind the conclusion of an iteration.
    """
    del after
    try:
        reference, slots = prepare(parse(config), execution_name(), SystemClock())
    except StoreUnavailable as error:
        raise FlyteRecoverableException(str(error)) from error
    return reference, slots


def prepare(config: RunConfig, execution: str, clock: Clock) -> tuple[PlanReference, list[int]]:
    """The plain function behind the task."""
    config.pools.check_prices()
    config.tracking.check_libraries()
    store = connect(config.run.url)
    is_new = not exists(store, layout.RUN)
    prompts = load_prompts(config.data, check_rows=is_new)
    with Grader(config.rewards) as grader:
        grader.check_columns(prompts.columns)
    with tempfile.TemporaryDirectory(prefix="gleaner-model-") as folder:
        model_dir = _model_directory(store, config, Path(folder))
        if is_new:
            # All of them now, so that no iteration in the middle of the run meets one that does not fit.
            _draw(config, prompts, model_dir, first=0, count=len(prompts))
            probe(store)
        open_run(
            store,
            config=dump(config),
            digest=digest(config),
            vocab_size=vocabulary_size(model_dir),
            clock=clock,
            explain=lambda stored: differences(identity(config), identity(parse(stored))),
        )
        acquire_lease(store, execution, config.run.lease_ttl_s, clock, known_dead=ended_here)
        iteration = next_iteration(store)
        if not exists(store, layout.plan(iteration)):
            first = read_report(store, iteration - 1).next_prompt if iteration else 0
            rows = _draw(config, prompts, model_dir, first=first, count=config.run.num_prompts_per_step)
            if iteration == 0:
                publish_initial(store, model_dir)
            write_plan(store, config, rows, iteration, first, stop_token_ids(model_dir), clock)
    store.put(layout.settings(iteration), records.encode(SettingsRecord(config=dump(config))))
    written = read_plan(store, iteration)
    log.info("iteration %d: weight version %d, %d slots", iteration, written.weight_version, len(written.slots))
    reference = PlanReference(
        run_url=config.run.url,
        iteration=iteration,
        weight_version=written.weight_version,
        execution=execution,
    )
    return reference, [slot.slot for slot in written.slots if slot.groups]


def _model_directory(store: ObjectStore, config: RunConfig, folder: Path) -> Path:
    """Where configuration and tokenizer are: in the run once it holds them, before that at policy.path."""
    if exists(store, layout.manifest(layout.weights(0))):
        model_files.download(store, folder)
        return folder
    directory = Path(config.policy.path).expanduser()
    check_model(directory)
    return directory


def publish_initial(store: ObjectStore, model_dir: Path) -> None:
    """Weight version 0: the pretrained model, as it is stored, and the files beside it. Done once in a run."""
    if exists(store, layout.manifest(layout.weights(0))):
        return
    model_files.upload(store, model_dir)
    publish(store, layout.weights(0), read_tensors(model_dir), {"source": model_dir.name})


def write_plan(
    store: ObjectStore,
    config: RunConfig,
    rows: list[PromptRow],
    iteration: int,
    first_prompt: int,
    stop_ids: tuple[int, ...],
    clock: Clock,
) -> None:
    """Prompts first, then the plan that names them; losing the race to another planner is no error."""
    body = prompt_table.encode_prompts(rows)
    prompts_key = layout.prompts(iteration, bytes_digest(body).hex())
    if not commit(store, prompts_key, body):
        raise ConflictingRecord(f"{prompts_key!r} holds other bytes than its name says")
    assignment = assign_groups(len(rows), config.pools.rollout.count)
    record = PlanRecord(
        iteration=iteration,
        weight_version=iteration,
        run_seed=config.run.seed,
        num_generations=config.run.num_generations,
        prompts_key=prompts_key,
        first_prompt=first_prompt,
        slots=tuple(SlotPlan(slot=slot, pool="rollout", groups=groups) for slot, groups in enumerate(assignment)),
        sampling=config.sampling.params(stop_ids),
        config=dump(config),
        created_at_s=clock.wall(),
    )
    commit(store, layout.plan(iteration), records.encode(record))


def execution_name() -> str:
    """Who advances the run: the Flyte execution, or this process on this machine."""
    name = current_context().execution_id.name
    return f"here:{socket.gethostname()}:{os.getpid()}" if name == "local" else name


def ended_here(execution: str) -> bool:
    """Whether a lease is held by a process of this machine that has ended."""
    kind, _, rest = execution.partition(":")
    host, _, pid = rest.rpartition(":")
    if kind != "here" or host != socket.gethostname():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _draw(config: RunConfig, prompts: PromptSet, model_dir: Path, *, first: int, count: int) -> list[PromptRow]:
    return draw_prompts(
        prompts,
        _tokenizer(model_dir),
        config.data,
        first=first,
        count=count,
        context_length=context_length(config.rollout, model_dir),
        max_completion_length=config.sampling.max_completion_length,
    )


def _tokenizer(model_dir: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # noqa: PLC0415 - costs seconds, and only a new plan needs it

    # Without any of them transformers makes a tokenizer that knows no word.
    if not any((model_dir / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"policy.path: no tokenizer in {str(model_dir)!r}; looked for {', '.join(TOKENIZER_FILES)}")
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    except Exception as error:  # whatever a damaged file makes of the library that reads it
        raise ModelError(f"policy.path: no usable tokenizer in {str(model_dir)!r}: {error}") from error
    return tokenizer
