"""The rewards of a run: reward models in the run's directory, and a grader with these models.

This module decides when a reward model is copied, compared and fetched, as the only file of grading that uses storage.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.paths import expanded, is_own_folder, own_file
from storage.records import model_copies
from storage.stores.store import ObjectStore
from tasks.configuration.rewards import RewardConfig, reward_names
from tasks.configuration.turns import TurnsConfig
from tasks.grading.grader import Grader

_FOLDERS = "gleaner-rewards-"
_OWNER = "owner"


def held_models(store: ObjectStore, configs: Sequence[RewardConfig], prefix: str = "") -> set[str]:
    """The names of the configured reward models that the run holds.

    If a model's configured folder still exists, it is compared with the run's copy; a run that has begun no longer
    needs the folder. prefix: the prefix of reward models' names in the run. Raises ConflictingRecord if the models
    differ.
    """
    held = set()
    for name, folder in _folders(configs).items():
        record = model_copies.stored(store, prefix + name)
        if record is not None:
            if folder.is_dir():
                model_copies.check(store, prefix + name, folder, record)
            held.add(name)
    return held


def models_named(configs: Sequence[RewardConfig]) -> set[str]:
    """The names of the configured reward models."""
    return set(_folders(configs))


def content_digests(store: ObjectStore, configs: Sequence[RewardConfig], prefix: str = "") -> dict[str, str]:
    """The content digest of each configured reward model by name, from the run's copy or else from the folder.

    A model without copy and folder is left out. prefix: as for `held_models`.
    """
    digests = {}
    for name, folder in _folders(configs).items():
        record = model_copies.stored(store, prefix + name)
        if record is None and folder.is_dir():
            record = model_copies.describe(folder)
        if record is not None:
            digests[name] = model_copies.content_digest(record)
    return digests


def publish_models(store: ObjectStore, configs: Sequence[RewardConfig], prefix: str = "") -> None:
    """Copy missing reward models into the run. prefix: as for `held_models`."""
    for name, folder in _folders(configs).items():
        if model_copies.stored(store, prefix + name) is None:
            model_copies.upload(store, prefix + name, folder)


@contextmanager
def open_grader(
    store: ObjectStore,
    configs: Sequence[RewardConfig],
    device: str,
    prefix: str = "",
    turns: TurnsConfig | None = None,
) -> Iterator[Grader]:
    """The run's grader within the block, with reward models fetched into a temporary folder.

    Args:
        store: The run's store.
        configs: The configured functions.
        device: The device of reward models with device "auto".
        prefix: The prefix of reward models' names in the run.
        turns: As for `Grader`.

    Raises:
        GradingError: A function cannot be used.
    """
    with (
        fetched_models(store, _folders(configs), prefix) as folders,
        Grader(configs, folders=folders, device=device, turns=turns) as grader,
    ):
        yield grader


@contextmanager
def fetched_models(store: ObjectStore, names: Iterable[str], prefix: str = "") -> Iterator[dict[str, Path]]:
    """A folder with the run's copy of each named reward model, within the block.

    prefix: as for `held_models`. Raises ObjectMissing for a model that the run does not hold, and CorruptObject.
    """
    with _temporary_folder() as root:
        folders = {name: root / name for name in names}
        for name, folder in folders.items():
            folder.mkdir()
            model_copies.download(store, prefix + name, folder)
        yield folders


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder that is removed at the end of the block, or after a kill by the next call on this machine."""
    _remove_abandoned()
    root = Path(tempfile.mkdtemp(prefix=_FOLDERS))
    with own_file(root / "new", os.O_WRONLY | os.O_CREAT) as owner:
        # Locked under another name first, because a file _OWNER without a lock marks an abandoned folder.
        fcntl.flock(owner, fcntl.LOCK_EX)
        (root / "new").rename(root / _OWNER)
        try:
            (root / "models").mkdir()
            yield root / "models"
        finally:
            shutil.rmtree(root, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove the folders of this user's dead processes; the lock of a folder ends with its process."""
    for folder in filter(is_own_folder, Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*")):
        with suppress(OSError), own_file(folder / _OWNER) as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _folders(configs: Sequence[RewardConfig]) -> dict[str, Path]:
    named = zip(reward_names(configs), configs, strict=True)
    return {name: expanded(config.model) for name, config in named if config.model is not None}
