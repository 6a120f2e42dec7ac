"""The teachers of a run: checked before the run exists, and copied into the run with its first plan."""

import json
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from resources.model_config import CONFIG, model_fields, positions_max
from storage.paths import expanded
from storage.records import layout
from storage.records.run import exists
from storage.stores.store import ObjectStore
from storage.weights.tensor_sets import publish
from tasks.configuration.run_config import RunConfig
from tasks.configuration.teacher import TeacherConfig, longest_scored
from tasks.learning.pretrained import ModelError, check_model, read_tensors, vocabulary_size
from tasks.preparing.engine_fit import EngineMisfit, check_scorer_fits
from tasks.preparing.local_inputs import LocalInputs
from tasks.preparing.model_check import check_model_use
from tasks.preparing.model_use import ModelUse, use_of
from tasks.prompts.prompt import Prompt, PromptError
from tasks.prompts.vocabulary import first_difference, read_vocabulary, vocabulary_digest

OF_POLICY = "policy.path"


def held_teachers(store: ObjectStore, teacher: TeacherConfig) -> set[str]:
    """The names of the teachers that the run holds, whose directories are not read again."""
    return {name for name in teacher.models if exists(store, layout.manifest(layout.teacher(name)))}


def with_local_teachers(store: ObjectStore, config: RunConfig, inputs: LocalInputs) -> RunConfig:
    """The configuration with local paths for teachers that the run does not hold; raises HubError."""
    if config.teacher is None or held_teachers(store, config.teacher).issuperset(config.teacher.models):
        return config
    return replace(config, teacher=inputs.teacher(config.teacher))


def publish_teachers(store: ObjectStore, local: TeacherConfig, held: Collection[str]) -> None:
    """Copy the teachers that are not `held` into the run; raises ModelError, and ConflictingRecord for another's."""
    for name, path in local.models.items():
        if name not in held:
            directory = expanded(path)
            told = {"source": directory.name, "config": json.loads((directory / CONFIG).read_text(encoding="utf-8"))}
            publish(store, layout.teacher(name), read_tensors(directory), told)


def check_teachers(config: RunConfig, local: TeacherConfig, model_dir: Path, prompts: Iterable[Prompt]) -> list[str]:
    """Refuse a teacher that cannot score the run's responses; returns the doubts, one a line.

    local: with local paths. model_dir: the policy's directory. Raises ModelError, and PromptError for a prompt whose
    teacher is not one of the run's. Every line names the field of the teacher.
    """
    doubts: list[str] = []
    for name, path in local.models.items():
        field = local.field_of(name)
        directory = expanded(path)
        try:
            check_model(directory)
            found = check_model_use(config, directory, _scoring_use(config, model_dir, directory))
        except ModelError as error:
            raise ModelError(_of_teacher(str(error), field)) from None
        doubts += [_of_teacher(doubt, field) for doubt in found.doubts]
        _check_sizes(config, field, directory, model_dir)
        check_vocabulary(field, directory, model_dir)
        if local.engine == "vllm":
            _check_vllm(config, local, field, directory, model_dir)
    if local.column is not None:
        _check_column(local, prompts)
    return doubts


def _of_teacher(text: str, field: str) -> str:
    return text.replace(OF_POLICY, field).replace("rollout.engine", "teacher.engine")


def check_vocabulary(field: str, directory: Path, model_dir: Path) -> dict[str, int]:
    """The vocabulary of a model beside the policy; raises ModelError if it is not the policy's, and PromptError.

    field: the field that names the model. model_dir: the policy's directory.
    """
    vocabulary, their = read_vocabulary(model_dir), read_vocabulary(directory)
    if vocabulary_digest(their) != vocabulary_digest(vocabulary):
        raise ModelError(
            f"{field}: the tokenizer of {str(directory)!r} is not that of {OF_POLICY} ({str(model_dir)!r}); "
            f"allowed: equal vocabularies; the first token that only one of them has: "
            f"{first_difference(their, vocabulary)}"
        )
    return vocabulary


def _scoring_use(config: RunConfig, model_dir: Path, directory: Path) -> ModelUse:
    """The use of a teacher: passes of the trainer's dtype over the policy's sequences, in torch or vLLM."""
    reach = positions_max(model_fields(directory))
    use, by_vllm = use_of(config, model_dir), config.teacher is not None and config.teacher.engine == "vllm"
    length = use.context_length if reach is None else min(use.context_length, reach)
    use = replace(use, torch=False, vllm=by_vllm, context_length=length, lora=None, critic=False)
    # Scorers have the trainer's dtype and device.
    return replace(use, dtype=use.trainer_dtype, on_cpu=use.trainer_on_cpu) if by_vllm else use


def _check_sizes(config: RunConfig, field: str, directory: Path, model_dir: Path) -> None:
    rows, needed = vocabulary_size(directory), vocabulary_size(model_dir)
    if rows < needed:
        raise ModelError(
            f"{field}: {str(directory)!r} has vocab_size {rows}; allowed: at least that of {OF_POLICY} ({needed}), "
            "whose every token may be sampled"
        )
    reach = positions_max(model_fields(directory))
    longest = config.rollout.context_length or config.sampling.max_completion_length + 1
    if reach is not None and reach < longest:
        raise ModelError(
            f"{field}: {str(directory)!r} reads at most {reach} tokens; allowed: at least {longest}, as long as a "
            "sequence of the run may be"
        )


def _check_vllm(config: RunConfig, local: TeacherConfig, field: str, directory: Path, model_dir: Path) -> None:
    """Refuse what vLLM cannot score: a sequence is a prompt, behind which vLLM generates a token."""
    reach = positions_max(model_fields(directory))
    longest = longest_scored(config, positions_max(model_fields(model_dir)), reach)
    if longest is None:
        return
    if longest == reach:
        raise ModelError(
            f"{field}: {str(directory)!r} reads at most {reach} tokens, and a sequence may be as long; allowed with "
            f"teacher.engine 'vllm': rollout.context_length up to {reach - 1}, or a data.max_prompt_length that leaves "
            "a token free"
        )
    try:
        check_scorer_fits(config, local, directory, longest)
    except EngineMisfit as error:
        raise ModelError(f"{field}: {error}") from None


def _check_column(local: TeacherConfig, prompts: Iterable[Prompt]) -> None:
    for prompt in prompts:
        try:
            local.teacher_of(prompt.columns)
        except ValueError as error:
            raise PromptError(f"{prompt.place or f'prompt {prompt.id!r}'}: {error}") from None
