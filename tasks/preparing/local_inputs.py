"""A configuration with every input local: ids of the hub replaced by paths, at the commits that a run keeps.

The run stores the configuration as written; only readers of files get the configuration with paths.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from storage.digests import digest_of
from storage.paths import expanded
from storage.records import model_files
from storage.records.run import read_run
from storage.records.sources import HubSource, read_rows, store_rows
from storage.stores.store import ObjectMissing, ObjectStore
from tasks.configuration.data import SUBMITTED, DataConfig
from tasks.configuration.evaluation import EvaluationConfig
from tasks.configuration.older_form import ARITHMETIC
from tasks.configuration.rewards import RewardConfig, reward_names
from tasks.configuration.rollout import SpeculationConfig
from tasks.configuration.run_config import RunConfig
from tasks.configuration.run_section import PolicyConfig
from tasks.configuration.teacher import TeacherConfig
from tasks.hub.careful_client import COMMIT
from tasks.hub.data_sets import join_pieces, parquet_pieces
from tasks.hub.repositories import HubError, Kind, commit_of, model_folder, names_repository
from tasks.learning.pretrained import ModelError, check_model
from tasks.preparing.run_selection import selected
from tasks.prompts.prompt import PromptError

# Of the rows that are responses of other runs, among the sources of run.json.
OF_RUNS = "data.runs"


@dataclass
class LocalInputs:
    """The inputs of a configuration as local files.

    Attributes:
        folder: The folder of the local files.
        store: The store of the run; None without a run.
        held: The sources from the hub in run.json, by field; None without a run: the hub is asked.
        found: The sources that the hub was asked for, by field.
        pieces: The rows of data sets in `found`, by field.
    """

    folder: Path
    store: ObjectStore | None = None
    held: dict[str, HubSource] | None = None
    found: dict[str, HubSource] = field(default_factory=dict)
    pieces: dict[str, list[bytes]] = field(default_factory=dict)

    def policy(self, policy: PolicyConfig) -> PolicyConfig:
        """The policy by a local path; raises HubError."""
        path = self._model("policy", "path", policy.path, policy.revision)
        return replace(policy, path=path, revision=None)

    def teacher(self, teacher: TeacherConfig) -> TeacherConfig:
        """The teachers by local paths; raises HubError."""
        if teacher.path is not None:
            path = self._model("teacher", "path", teacher.path, teacher.revision)
            return replace(teacher, path=path, revision=None)
        paths = {name: self._model("teacher.paths", name, path, None) for name, path in teacher.paths.items()}
        return replace(teacher, paths=paths)

    def speculation(self, speculation: SpeculationConfig) -> SpeculationConfig:
        """The section `rollout.speculation` with a local path of its draft model, if it has one; raises HubError."""
        if speculation.draft_model is None:
            return speculation
        path = self._model("rollout.speculation", "draft_model", speculation.draft_model, speculation.revision)
        return replace(speculation, draft_model=path, revision=None)

    def data(self, data: DataConfig, section: str = "data", kind: str = "rl") -> DataConfig:
        """Prompts by a local path; raises HubError, and PromptError for settings that a local path does not have.

        kind: the `algorithm.kind`, by which responses of other runs are selected.
        """
        if data.runs:
            return self._of_runs(data, kind)
        if data.source in (ARITHMETIC, SUBMITTED):
            return data
        asked = HubSource(
            repo=data.source, revision=data.revision, subset=data.subset, split=data.split, commit="0" * 40
        )
        name = f"{section}.source"
        commit = self._commit("dataset", name, asked)
        if commit is None:
            for setting, value in (("revision", data.revision), ("subset", data.subset)):
                if value is not None:
                    raise PromptError(f"{section}.{setting}: value {value!r}; allowed: null, because source is a path")
            return data
        held = (self.held or {}).get(name)
        if held is not None and held.asked == asked.asked and self.store is not None:
            pieces = read_rows(self.store, held)
        else:
            pieces = parquet_pieces(data.source, commit, data.subset, data.split, section)
            self.found[name], self.pieces[name] = replace(asked, commit=commit), pieces
        file = self.folder / section / data.source / (data.subset or "") / f"{data.split or 'rows'}.parquet"
        join_pieces(pieces, file)
        return replace(data, source=str(file), subset=None, split=None, revision=None)

    def _of_runs(self, data: DataConfig, kind: str) -> DataConfig:
        """Responses of other runs, as a run holds them from its beginning on, or as they are now."""
        held = (self.held or {}).get(OF_RUNS)
        if held is not None and self.store is not None:
            pieces = read_rows(self.store, held)
        else:
            pieces = selected(data, kind)
            content = "".join(map(digest_of, pieces)).encode()
            commit = hashlib.sha1(content, usedforsecurity=False).hexdigest()
            self.found[OF_RUNS] = HubSource(repo=", ".join(data.runs), revision=None, commit=commit)
            self.pieces[OF_RUNS] = pieces
        file = self.folder / "data" / "runs.parquet"
        join_pieces(pieces, file)
        return replace(data, source=str(file), runs=(), select=None)

    def rewards(self, rewards: tuple[RewardConfig, ...], section: str = "rewards") -> tuple[RewardConfig, ...]:
        """Rewards whose models have local paths; raises HubError."""
        names = reward_names(rewards)
        return tuple(
            reward
            if reward.model is None
            else replace(
                reward, model=self._model(f"{section}.{name}", "model", reward.model, reward.revision), revision=None
            )
            for name, reward in zip(names, rewards, strict=True)
        )

    def evaluation(self, evaluation: EvaluationConfig) -> EvaluationConfig:
        """The section `evaluation` with local paths; raises HubError."""
        own = evaluation.rewards
        return replace(
            evaluation,
            data=self.data(evaluation.data, "evaluation.data"),
            rewards=None if own is None else self.rewards(own, "evaluation.rewards"),
        )

    def store_found(self, store: ObjectStore) -> dict[str, HubSource]:
        """Store the rows of the found data sets; returns the sources from the hub, for run.json."""
        return {
            name: replace(source, rows=store_rows(store, self.pieces.get(name, [])))
            for name, source in self.found.items()
        }

    def _model(self, section: str, setting: str, path: str, revision: str | None) -> str:
        name = f"{section}.{setting}"
        asked = HubSource(repo=path, revision=revision, commit="0" * 40)
        commit = self._commit("model", name, asked)
        if commit is None:
            if revision is not None:
                raise HubError(f"{section}.revision: value {revision!r}; allowed: null, because {setting} is a path")
            return path
        self.found[name] = replace(asked, commit=commit)
        return str(model_folder(path, commit, name))

    def _commit(self, kind: Kind, name: str, asked: HubSource) -> str | None:
        """The commit to read; None for a local path. A run goes on with the commits of its beginning."""
        held = (self.held or {}).get(name)
        if held is not None and held.asked == asked.asked:
            return held.commit
        may_change = name.startswith(("evaluation.", "rewards.", "rollout."))
        if not names_repository(asked.repo) or (self.held is not None and not may_change):
            return None
        commit = commit_of(kind, asked.repo, asked.revision, name)
        if self.held is not None and COMMIT.fullmatch(asked.revision or "") is None:
            raise HubError(
                f"{name.rpartition('.')[0]}.revision: value {asked.revision!r}; allowed, because the run began "
                f"without it: a commit, such as {commit}, so that every later reader reads the same"
            )
        return commit


@contextmanager
def open_local_inputs(store: ObjectStore | None = None) -> Iterator[LocalInputs]:
    """The inputs of a run, or with None of a configuration without a run, until the end of the block."""
    held = None
    if store is not None:
        try:
            held = read_run(store).sources
        except ObjectMissing:
            held = None
    with TemporaryDirectory(prefix="gleaner-inputs-") as folder:
        yield LocalInputs(Path(folder), store if held is not None else None, held)


def model_directory(config: RunConfig) -> Path:
    """The directory policy.path, checked to hold a model to begin with; raises ModelError."""
    try:
        directory = expanded(config.policy.path)
    except ValueError as error:
        raise ModelError(f"policy.{error}") from None
    check_model(directory)
    model_files.describe(directory)
    return directory
