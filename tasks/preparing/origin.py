"""The origin of a run that begins with a version of another run (`run.from`): found, checked, and copied.

The other run is read alone: no object of it is written or deleted, and its lease is not asked for.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace

from storage.clock import SystemClock
from storage.errors import WrongInputError
from storage.records import layout, model_files
from storage.records.lineage import VersionOrigin
from storage.records.records import RunRecord
from storage.records.run import connect_to_run, next_prompt, read_run
from storage.stores.connect import connect
from storage.stores.store import ObjectMissing, ObjectStore, StoreDenied, StoreUnavailable, StoreUnfit
from storage.weights.adapters import BASE_VERSION, adapter_record
from storage.weights.inspection import inspect_set
from storage.weights.manifest import Manifest
from storage.weights.tensor_sets import copy_set, read_manifest
from tasks.configuration.optimizer import ADAMW, OptimizerConfig
from tasks.configuration.origins import version_of
from tasks.configuration.run_config import ConfigError, RunConfig, identity, parse_held
from tasks.configuration.run_section import PolicyConfig
from tasks.learning.pretrained import tensor_shapes
from tasks.preparing.local_inputs import LocalInputs, model_directory
from tasks.reporting.export_model import choose_version, write_weights
from tasks.sampling.session.pulled_model import pull_model

# Of a checkpoint's manifest: the state besides tensors (TrainerState).
_STATE = "trainer_state"


class OriginError(WrongInputError):
    """The version of another run cannot be the beginning of this run."""


@dataclass(frozen=True)
class Origin:
    """A version of another run.

    Attributes:
        store: The other run.
        record: What run.json states of the version.
    """

    store: ObjectStore
    record: VersionOrigin

    def local_policy(self, config: RunConfig, inputs: LocalInputs) -> PolicyConfig:
        """A folder with the version's weights, every byte verified, and the small files of the model.

        Takes the memory of the version. The small files are the other run's, or those of a `policy.path` of its own.
        Raises OriginError if its tensors are others, and what reading raises.
        """
        record, field = self.record, f"run.from: value {config.run.from_!r}"
        folder = inputs.folder / f"{record.url.rstrip('/').rpartition('/')[2]}@{record.version}"
        folder.mkdir()
        if config.policy.path == config.run.from_:
            model_files.download(self.store, folder)
        else:
            given = model_directory(replace(config, policy=inputs.policy(config.policy)))
            _check_fits(tensor_shapes(given), self._shapes(), f"{field}; its", config.policy.path)
            for name in model_files.describe(given):
                shutil.copyfile(given / name, folder / name)
        manifest, pulled = pull_model(self.store, record.version, None, SystemClock())
        if manifest.digest != record.digest:
            raise OriginError(f"{field}; its digest is {manifest.digest}; allowed: {record.digest}, which run.json has")
        tensors = dict(pulled)
        write_weights(folder, tensors, {name: (block.dtype, block.shape) for name, block in tensors.items()})
        return PolicyConfig(path=str(folder))

    def copy_optimizer(self, store: ObjectStore, *, with_critic: bool) -> None:
        """Copy the version's checkpoint to checkpoint 0 of the run in `store`, if the record has one.

        The critic's comes first, as in a trainer's own checkpoint. Copying again changes nothing.
        """
        if self.record.optimizer is None:
            return
        for prefix in (layout.critic_checkpoint, layout.checkpoint) if with_critic else (layout.checkpoint,):
            place = prefix(self.record.version)
            manifest = read_manifest(self.store, place)
            if prefix is layout.checkpoint and manifest.digest != self.record.optimizer:
                raise OriginError(f"run.from: {place} of {self.record.url} is not the one that {layout.RUN!r} names")
            state = {**manifest.metadata[_STATE], "weight_version": 0}
            copied = replace(manifest, metadata={**manifest.metadata, _STATE: state})
            copy_set(self.store, copied, place, store, prefix(0))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        manifest = _manifest(self.store, layout.weights(self.record.version))
        if adapter_record(manifest, self.record.version) is not None:
            manifest = _manifest(self.store, layout.weights(BASE_VERSION))
        return {name: entry.shape for name, entry in manifest.tensors.items()}


def find_origin(config: RunConfig, held: VersionOrigin | None = None) -> Origin | None:
    """The version that `run.from` names, looked at and not read; None without the field.

    held: what run.json states, if the run has begun already. Raises OriginError for a run or a version that is not
    there, and for an optimizer that cannot go on, one line each; CorruptObject for a checkpoint that is not whole.
    """
    if config.run.from_ is None:
        return None
    named, field = version_of(config.run.from_), f"run.from: value {config.run.from_!r}"
    try:
        other = connect_to_run(named.url)
        choose_version(other, named.version)
    except LookupError as error:
        raise OriginError(f"{field}; {str(error).removeprefix('version: ')}") from None
    if held is not None:
        return Origin(other, held)
    run, manifest = read_run(other), _manifest(other, layout.weights(named.version))
    record = VersionOrigin(url=named.url, version=named.version, digest=manifest.digest)
    if config.run.from_optimizer:
        record = replace(
            record,
            optimizer=_optimizer(config, other, run, named.version).digest,
            counted_from=named.version + (0 if run.origin is None else run.origin.counted_from),
            first_prompt=_first_prompt(config, other, run, named.version),
        )
    return Origin(other, record)


def origin_to_check(config: RunConfig) -> Origin | None:
    """The origin whose model `gleaner check` looks at: of a run that has begun its own version 0.

    Raises OriginError as `find_origin`.
    """
    if config.run.from_ is None:
        return None
    try:
        own = connect(config.run.url)
        digest = read_manifest(own, layout.weights(0)).digest
    except (ObjectMissing, StoreUnavailable, StoreDenied, StoreUnfit):
        return find_origin(config)
    return Origin(own, VersionOrigin(url=own.url, version=0, digest=digest))


def position(store: ObjectStore, run: RunRecord, iteration: int) -> tuple[int, int]:
    """The iterations of other runs behind version 0, and the running position of an iteration's first prompt."""
    behind, first = (run.origin.counted_from, run.origin.first_prompt) if run.origin else (0, 0)
    return behind, next_prompt(store, iteration) if iteration else first


def _optimizer(config: RunConfig, other: ObjectStore, run: RunRecord, version: int) -> Manifest:
    """The manifest of the version's checkpoint; raises OriginError unless the run can go on with it."""
    begins = "run.from_optimizer: value true; allowed"
    if run.config.get("lora") is not None:
        raise OriginError(f"{begins} with a version of adapters (lora): false, because its weights are merged")
    if version == 0 and (run.origin is None or run.origin.optimizer is None):
        raise OriginError(f"{begins} with version 0: false, because no optimizer has taken a step")
    try:
        choose_version(other, version, layout.CHECKPOINTS, "checkpoint")
    except LookupError as error:
        raise OriginError(f"run.from: value {config.run.from_!r}; {str(error).removeprefix('version: ')}") from None
    inspect_set(other, layout.checkpoint(version))
    manifest = _manifest(other, layout.checkpoint(version))
    _check_goes_on("optimizer", config.optimizer, manifest)
    if config.algorithm.estimator.needs_critic:
        try:
            inspect_set(other, layout.critic_checkpoint(version))
        except ObjectMissing:
            estimator = config.algorithm.advantage_estimator
            raise OriginError(
                f"algorithm.advantage_estimator: value {estimator!r}; allowed with run.from_optimizer: one without a "
                f"critic, because {other.url} has none"
            ) from None
        critic = _manifest(other, layout.critic_checkpoint(version))
        _check_goes_on("critic.optimizer", config.critic.optimizer, critic)
    return manifest


def _check_goes_on(field: str, config: OptimizerConfig, manifest: Manifest) -> None:
    """Raise OriginError for an optimizer of another kind, and for a schedule that the stored one has gone through."""
    state = manifest.metadata.get(_STATE)
    kind, steps = (
        (state.get("optimizer", ADAMW), state.get("optimizer_steps", 0)) if isinstance(state, dict) else (None, 0)
    )
    if kind != config.name:
        raise OriginError(
            f"{field}.name: value {config.name!r}; allowed with run.from_optimizer: {kind!r}, as in the other run"
        )
    if config.schedule != "constant" and config.total_steps is not None and config.total_steps <= steps:
        raise OriginError(
            f"{field}.total_steps: value {config.total_steps}; allowed with run.from_optimizer: more than the {steps} "
            "steps of the other run, after which the schedule goes on"
        )


def _first_prompt(config: RunConfig, other: ObjectStore, run: RunRecord, version: int) -> int:
    """Where the other run's prompts stood at the version, if the section `data` is the same; else 0."""
    try:
        theirs = identity(parse_held(run.config))["data"]
    except ConfigError:
        return 0
    if theirs != identity(config)["data"]:
        return 0
    if version == 0:
        return 0 if run.origin is None else run.origin.first_prompt
    return next_prompt(other, version)


def _manifest(store: ObjectStore, prefix: str) -> Manifest:
    try:
        return read_manifest(store, prefix)
    except ObjectMissing:
        raise OriginError(f"run.from: {prefix} of {store.url} was deleted at this moment") from None


def _check_fits(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]], of: str, path: str) -> None:
    """Raise OriginError, which names the first tensor, unless names and shapes are equal."""
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            here, there = (list(each[name]) if name in each else "missing" for each in (ours, theirs))
            raise OriginError(f"{of} tensor {name!r} is {there}, and {here} in policy.path {path!r}; allowed: the same")
