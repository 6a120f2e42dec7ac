"""The first weights of a run: the pretrained model, or a version of another run, published as version 0."""

from dataclasses import replace
from pathlib import Path

from storage.records import layout, model_files
from storage.records.run import exists, read_run
from storage.stores.store import ObjectMissing, ObjectStore
from storage.weights.tensor_sets import publish
from tasks.configuration.run_config import RunConfig
from tasks.grading.run_rewards import models_named, publish_models
from tasks.learning.pretrained import read_tensors
from tasks.preparing.draft_model_check import with_local_draft_model
from tasks.preparing.local_inputs import LocalInputs, model_directory
from tasks.preparing.origin import Origin, find_origin
from tasks.preparing.teacher_check import held_teachers, publish_teachers, with_local_teachers


def has_first_weights(store: ObjectStore) -> bool:
    """Whether version 0 is published."""
    return exists(store, layout.manifest(layout.weights(0)))


def origin_of(store: ObjectStore, config: RunConfig) -> Origin | None:
    """The version of another run that is still to be copied; None without one, or once version 0 is published.

    Raises OriginError.
    """
    if config.run.from_ is None or has_first_weights(store):
        return None
    try:
        held = read_run(store).origin
    except ObjectMissing:
        held = None
    return find_origin(config, held)


def with_local_inputs(
    store: ObjectStore, config: RunConfig, inputs: LocalInputs, held: set[str], origin: Origin | None
) -> RunConfig:
    """The configuration with local paths for inputs that the run does not hold; held: reward models of the run."""
    local = replace(config, data=inputs.data(config.data, kind=config.algorithm.kind))
    if origin is not None:
        local = replace(local, policy=origin.local_policy(config, inputs))
    elif not has_first_weights(store):
        local = replace(local, policy=inputs.policy(config.policy))
    if not held.issuperset(models_named(config.rewards)):
        local = replace(local, rewards=inputs.rewards(config.rewards))
    return with_local_draft_model(store, with_local_teachers(store, local, inputs), inputs)


def model_directory_of_run(store: ObjectStore, config: RunConfig, folder: Path) -> Path:
    """The directory of config.json and tokenizer: copied from the run if version 0 is published, else policy.path."""
    if has_first_weights(store):
        model_files.download(store, folder)
        return folder
    return model_directory(config)


def publish_first(store: ObjectStore, model_dir: Path, local: RunConfig, origin: Origin | None) -> None:
    """Publish version 0, the reward models and the teachers; of another run's version its optimizer comes first.

    local: the configuration with local paths. Version 0 completes the beginning: until then every attempt copies again.
    """
    if origin is not None:
        origin.copy_optimizer(store, with_critic=local.algorithm.estimator.needs_critic)
    publish_initial(store, model_dir)
    publish_models(store, local.rewards)
    if local.teacher is not None:
        publish_teachers(store, local.teacher, held_teachers(store, local.teacher))


def publish_initial(store: ObjectStore, model_dir: Path) -> None:
    """Publish weight version 0, the model of a directory as stored; once in a run."""
    if has_first_weights(store):
        return
    publish(store, layout.weights(0), read_tensors(model_dir), {"source": model_dir.name})
