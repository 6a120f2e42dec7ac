"""Regrading: grades the stored responses of committed iterations with the rewards of a configuration.

The calls are those of training: a grader that begins anew at each iteration gets the same responses in the same groups
and in the same order. So equal rewards give equal bits, also where a function sees a whole micro-batch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from storage.journal.compaction import read_batches
from storage.journal.recorded_responses import recorded_responses
from storage.paths import expanded
from storage.records import layout, model_copies, model_files, records
from storage.records.gradings import GradedRecord, GradingRecord, check_name, check_rewards_of
from storage.records.prompt_table import read_prompts
from storage.records.records import BatchRecord, PlanRecord
from storage.records.run import count_committed, exists, read_plan, read_run
from storage.stores.store import ObjectStore
from storage.waiting import Progress, no_progress
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.rewards import OPERATIONAL, RewardConfig, reward_names
from tasks.configuration.run_config import RunConfig, parse_held
from tasks.grading.cases import grading_case
from tasks.grading.grader import Graded, Grader
from tasks.grading.reward import GradingError
from tasks.grading.run_rewards import fetched_models
from tasks.preparing.local_inputs import open_local_inputs
from tasks.prompts.decode import open_completion_decoder
from tasks.regrading.comparing import compare
from tasks.regrading.reward_change import RewardChange
from tasks.reporting.export import parse_range
from tasks.turns.reading import message_reader


def regrade(
    store: ObjectStore, config: RunConfig, iterations: Sequence[int], name: str, progress: Progress = no_progress
) -> list[int]:
    """Write what the rewards of `config` give to the responses of iterations; returns those that this call graded.

    An iteration that the grading has is not graded again, so a call goes on where a killed one stood. Memory holds the
    tokens of one iteration. Of `config` count the rewards, the device of the trainer, and the environment variables of
    the turns; everything else is the run's.

    Args:
        store: The run.
        config: The configuration with the rewards.
        iterations: Committed iterations, at least one.
        name: The name of the grading.
        progress: Called before each iteration, with how many are done and how many there are.

    Raises:
        ValueError: The name cannot be one, there is no reward, or the run's responses are examples.
        ConflictingRecord: The name has a grading whose rewards differ.
        GradingError: A function cannot be used, or fails as it may not in training.
        CorruptObject: The run's objects are damaged or contradict each other.
        HubError: A reward model cannot be fetched.
    """
    check_name(name)
    _check_there_is_work(store, config)
    missing = [iteration for iteration in iterations if not exists(store, layout.graded(name, iteration))]
    with _model_folders(store, config.rewards) as folders, model_files.downloaded(store) as model_dir:
        models = {each: model_copies.content_digest(model_copies.describe(path)) for each, path in folders.items()}
        for done, iteration in enumerate(missing or iterations[:1]):
            progress(f"grading iteration {iteration}", done, len(missing))
            try:
                with Grader(
                    config.rewards, folders=folders, device=config.trainer.device, turns=config.turns
                ) as grader:
                    grading = _described(config.rewards, models, grader)
                    check_rewards_of(store, name, grading)
                    if iteration in missing:
                        graded = _graded(store, read_plan(store, iteration), grader, model_dir)
                        _keep(store, name, grading, graded)
            except GradingError as error:
                raise GradingError(f"iteration {iteration}: {error}") from error
    return missing


def regrade_and_compare(
    store: ObjectStore, config: RunConfig, iterations: str, name: str, progress: Progress = no_progress
) -> tuple[list[int], RewardChange]:
    """Grade what `iterations` ("a:b", as of `parse_range`) names of the committed iterations, and compare the rewards.

    Returns the iterations that this call graded, and the comparison of all. Raises LookupError if no iteration is
    committed, ValueError for the range, and what `regrade` and `compare` raise.
    """
    count = count_committed(store)
    if not count:
        raise LookupError(f"{store.url} holds no committed iteration; allowed: a run with one")
    chosen = parse_range(iterations, count)
    graded = regrade(store, config, chosen, name, progress)
    return graded, compare(store, name, chosen, progress)


def _check_there_is_work(store: ObjectStore, config: RunConfig) -> None:
    if not config.rewards:
        raise ValueError("rewards: none; allowed: at least one, or nothing is graded")
    algorithm = parse_held(read_run(store).config).algorithm
    if algorithm.learns_examples:
        kind = algorithm.kind
        raise ValueError(
            f"run: value {store.url!r}, whose responses are examples (algorithm.kind {kind!r}); allowed: a run whose "
            "policy samples responses"
        )


def _keep(store: ObjectStore, name: str, grading: GradingRecord, graded: GradedRecord) -> None:
    """Store a graded iteration; the name is taken only now, so rewards that cannot grade take none.

    Raises ConflictingRecord if another process has given the name to other rewards meanwhile. Of two processes that
    grade the same iteration the first decides.
    """
    if not records.commit(store, layout.grading(name), grading):
        check_rewards_of(store, name, grading)
    records.commit(store, layout.graded(name, graded.iteration), graded)


def _graded(store: ObjectStore, plan: PlanRecord, grader: Grader, model_dir: Path) -> GradedRecord:
    prompts, batches = read_prompts(store, plan), read_batches(store, plan.iteration)
    decode = open_completion_decoder(model_dir, plan.sampling)
    read_messages = message_reader(config_in_force(store, plan).turns, plan, model_dir)
    stored = dict(recorded_responses(store, plan))
    graded: list[Graded] = []
    for numbers in _calls(plan, batches):
        asked = [(stored.pop(number), prompts[number // plan.num_generations]) for number in numbers]
        graded += grader.grade([grading_case(row, prompt, decode, read_messages) for row, prompt in asked])
    graded.sort(key=lambda each: each.response)
    return GradedRecord(
        iteration=plan.iteration,
        responses=tuple(each.response for each in graded),
        reward=tuple(each.reward for each in graded),
        rewards={name: tuple(each.values[name] for each in graded) for name in grader.names},
        reward_errors=tuple(error for each in graded for error in each.errors.values()),
        given_up=tuple(reason for each in graded for reason in each.given_up.values()),
    )


def _calls(plan: PlanRecord, batches: Sequence[BatchRecord]) -> Iterator[list[int]]:
    """The responses of each call of training's grader, in its order; responses that failed were in none."""
    for batch in batches:
        numbers = [response.response for response in batch.graded if response.reward is not None]
        if plan.groups_wanted is None:
            yield numbers
            continue
        # Groups that may be filtered are graded one by one, in the order of the plan.
        for _, group in groupby(sorted(numbers), key=lambda number: number // plan.num_generations):
            yield list(group)


def _described(configs: Sequence[RewardConfig], models: Mapping[str, str], grader: Grader) -> GradingRecord:
    """What decides the values of a grading, as for an evaluation, with the code of the user's functions."""
    rewards = []
    for name, config in zip(grader.names, configs, strict=True):
        settings: dict[str, Any] = json.loads(json.dumps(asdict(config)))
        deciding = {setting: value for setting, value in settings.items() if setting not in OPERATIONAL}
        rewards.append(deciding | {"name": name, "model": models.get(name), "source": grader.sources.get(name)})
    return GradingRecord(rewards=tuple(rewards))


@contextmanager
def _model_folders(store: ObjectStore, configs: Sequence[RewardConfig]) -> Iterator[dict[str, Path]]:
    """The folder of each reward model by name, within the block.

    A folder that exists is read where it is. The run's copy serves a model of the run's own configuration, the hub all
    others. Raises GradingError for a model that is nowhere, HubError, and what fetching raises.
    """
    named = dict(zip(reward_names(configs), configs, strict=True))
    wanted = {name: config for name, config in named.items() if config.model is not None}
    folders = {name: folder for name, config in wanted.items() if (folder := expanded(str(config.model))).is_dir()}
    elsewhere = {name: config for name, config in wanted.items() if name not in folders}
    of_run = _models_of_run(store) if elsewhere else {}
    copied = [name for name, config in elsewhere.items() if of_run.get(name) == config.model]
    from_hub = {name: config for name, config in elsewhere.items() if name not in copied}
    with fetched_models(store, copied) as fetched, open_local_inputs() as inputs:
        found = zip(from_hub, inputs.rewards(tuple(from_hub.values())), strict=True)
        folders |= fetched | {name: expanded(str(config.model)) for name, config in found}
        for name, folder in folders.items():
            if not folder.is_dir():
                allowed = "a folder, an id on the hub, or what the run's configuration says and its copy serves"
                raise GradingError(f"rewards.{name}.model: value {named[name].model!r}; allowed: {allowed}")
        yield folders


def _models_of_run(store: ObjectStore) -> dict[str, str | None]:
    """What the run's configuration says as `model`, for each reward model that the run holds by name."""
    own = parse_held(read_run(store).config).rewards
    named = zip(reward_names(own), own, strict=True)
    return {name: config.model for name, config in named if config.model and model_copies.stored(store, name)}
