"""The models of a run, published with its first plan: the policy's first weights, reward models and teachers."""

from pathlib import Path

from storage.records import layout
from storage.records.run import exists
from storage.stores.store import ObjectStore
from storage.weights.tensor_sets import publish
from tasks.configuration.run_config import RunConfig
from tasks.grading.run_rewards import publish_models
from tasks.learning.pretrained import read_tensors
from tasks.preparing.teacher_check import held_teachers, publish_teachers


def publish_first_models(store: ObjectStore, model_dir: Path, local: RunConfig) -> None:
    """Publish every model of a run that is not published; local: with local paths of such models."""
    publish_initial(store, model_dir)
    publish_models(store, local.rewards)
    if local.teacher is not None:
        publish_teachers(store, local.teacher, held_teachers(store, local.teacher))


def publish_initial(store: ObjectStore, model_dir: Path) -> None:
    """Publish weight version 0, the pretrained model as stored; once in a run."""
    if exists(store, layout.manifest(layout.weights(0))):
        return
    publish(store, layout.weights(0), read_tensors(model_dir), {"source": model_dir.name})
