"""The rewards of a run: its reward models, in its directory, and the grader that is opened from there.

Owns when a reward model is copied, compared and fetched; the only file of grading that knows storage.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from storage import reward_models
from storage.store import ObjectStore
from tasks.grading.config import RewardConfig, reward_names
from tasks.grading.grader import Grader


def held_models(store: ObjectStore, configs: Sequence[RewardConfig]) -> set[str]:
    """Names of the configured reward models that the run holds.

    A folder that is still where the configuration says is compared with what the run holds; a run that has begun needs
    it no more. Raises ConflictingRecord when it is another model.
    """
    held = set()
    for name, folder in _folders(configs).items():
        record = reward_models.stored(store, name)
        if record is not None:
            if folder.is_dir():
                reward_models.check(store, name, folder, record)
            held.add(name)
    return held


def publish_models(store: ObjectStore, configs: Sequence[RewardConfig]) -> None:
    """Copy the reward models that the run does not hold yet into it."""
    for name, folder in _folders(configs).items():
        if reward_models.stored(store, name) is None:
            reward_models.upload(store, name, folder)


@contextmanager
def open_grader(store: ObjectStore, configs: Sequence[RewardConfig], device: str) -> Iterator[Grader]:
    """The run's grader, with its reward models fetched into a temporary folder for as long as it is open.

    device: of those reward models whose own is "auto". Raises GradingError.
    """
    with tempfile.TemporaryDirectory(prefix="gleaner-rewards-") as root:
        folders = {name: Path(root) / name for name in _folders(configs)}
        for name, folder in folders.items():
            folder.mkdir()
            reward_models.download(store, name, folder)
        with Grader(configs, folders=folders, device=device) as grader:
            yield grader


def _folders(configs: Sequence[RewardConfig]) -> dict[str, Path]:
    named = zip(reward_names(configs), configs, strict=True)
    return {name: Path(config.model).expanduser() for name, config in named if config.model is not None}
