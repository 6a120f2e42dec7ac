"""The draft model of a run: checked before the run copies it, and compared with the copy from then on."""

from dataclasses import replace
from pathlib import Path

from resources.model_config import model_fields, positions_max
from storage.paths import expanded
from storage.records import model_copies
from storage.stores.store import ConflictingRecord, ObjectStore
from tasks.configuration.rollout import SpeculationConfig
from tasks.configuration.run_config import RunConfig
from tasks.learning.pretrained import ModelError, check_model, vocabulary_size
from tasks.preparing.local_inputs import LocalInputs
from tasks.preparing.model_check import check_model_use
from tasks.preparing.model_use import use_of
from tasks.preparing.teacher_check import OF_POLICY, check_vocabulary

FIELD = "rollout.speculation.draft_model"


def lacks_draft_model(store: ObjectStore, written: SpeculationConfig) -> bool:
    """Whether the run needs a draft model, and has no copy of it."""
    return written.drafting_model is not None and model_copies.stored(store, written.model_copy) is None


def with_local_draft_model(store: ObjectStore, config: RunConfig, inputs: LocalInputs) -> RunConfig:
    """The configuration with a local path for a draft model that the run lacks.

    Raises HubError, and ConflictingRecord if the directory of a copied model holds another one now.
    """
    written = config.rollout.speculation
    if written.drafting_model is None:
        return config
    if lacks_draft_model(store, written):
        return replace(config, rollout=replace(config.rollout, speculation=inputs.speculation(written)))
    folder, held = expanded(written.drafting_model), model_copies.stored(store, written.model_copy)
    if held is not None and folder.is_dir():
        try:
            model_copies.check(store, written.model_copy, folder, held)
        except ConflictingRecord:
            raise ConflictingRecord(
                f"{FIELD}: {str(folder)!r} holds another model than the run's copy; allowed: the same files, or a "
                "model in another directory"
            ) from None
    return config


def publish_draft_model(store: ObjectStore, written: SpeculationConfig, local: SpeculationConfig) -> None:
    """Copy the draft model into the run, once; local: with a local path."""
    if lacks_draft_model(store, written) and local.drafting_model is not None:
        model_copies.upload(store, written.model_copy, expanded(local.drafting_model))


def check_draft_model(config: RunConfig, local: SpeculationConfig, model_dir: Path) -> list[str]:
    """Refuse a model that cannot draft for the policy; returns the doubts, one a line.

    local: with a local path. model_dir: the policy's directory. Raises ModelError and PromptError; every line names the
    field.
    """
    if local.drafting_model is None:
        return []
    directory = expanded(local.drafting_model)
    use = replace(use_of(config, model_dir), lora=None, critic=False)
    try:
        check_model(directory)
        _check_positions(directory, use.context_length)
        found = check_model_use(config, directory, use)
    except ModelError as error:
        raise ModelError(str(error).replace(OF_POLICY, FIELD)) from None
    vocabulary = check_vocabulary(FIELD, directory, model_dir)
    rows, of_policy = vocabulary_size(directory), vocabulary_size(model_dir)
    if use.vllm and rows != of_policy:
        raise ModelError(
            f"{FIELD}: {str(directory)!r} has vocab_size {rows}; allowed with rollout.engine "
            f"{config.rollout.engine!r}: that of {OF_POLICY} ({of_policy}), because vLLM drafts with no other"
        )
    if rows <= max(vocabulary.values()):
        raise ModelError(
            f"{FIELD}: {str(directory)!r} has vocab_size {rows}; allowed: more than the largest id of its tokenizer "
            f"({max(vocabulary.values())})"
        )
    return [doubt.replace(OF_POLICY, FIELD) for doubt in found.doubts]


def _check_positions(directory: Path, needed: int) -> None:
    reach = positions_max(model_fields(directory))
    if reach is not None and reach < needed:
        raise ModelError(
            f"{FIELD}: {str(directory)!r} reads at most {reach} tokens; allowed: at least {needed}, as long as a "
            "sequence of the run may be (rollout.context_length)"
        )
