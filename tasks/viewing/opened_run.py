"""A run as Python reads it: `gleaner.open` and what it returns. Tables are Arrow's; `.to_pandas()` makes data frames.

It writes nothing to the run. What may change is read again each time, so a live run can be followed.
"""

from functools import cached_property
from operator import index
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from storage.clock import SystemClock
from storage.records import layout
from storage.records.gradings import read_graded
from storage.records.run import connect_to_run, count_committed, exists, plans_in_flight, read_plan, read_run
from storage.stores.store import ObjectStore
from tasks.configuration.iteration_config import resolved_in_force
from tasks.prompts.decode import Decode
from tasks.reporting.export import load_completion_decoder, rollout_tables
from tasks.reporting.export_model import export_model
from tasks.viewing.run_summary import committed_metrics

# What identifies a row of the metrics; all other columns are numbers.
_KEYS = {"iteration": pa.int64(), "weight_version": pa.int64(), "time_s": pa.float64()}


def open_run_at(url: str) -> "Run":
    """The run at a URL: a directory, or s3://bucket/prefix.

    Raises LookupError if there is none, CorruptObject for a run of another format, ValueError for another kind of URL.
    """
    return Run(connect_to_run(url))


class Run:
    """A live or finished run. Iterations are counted from 0, and can be read when they are committed."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"gleaner.open({self.url!r})"

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def iterations(self) -> range:
        """The numbers of the committed iterations."""
        return range(count_committed(self._store))

    @property
    def config(self) -> dict[str, Any]:
        """The configuration in force, with all defaults; before the first iteration, that of run.json."""
        planned = plans_in_flight(self._store)
        committed = self.iterations
        if not planned and not committed:
            return dict(read_run(self._store).config)
        plan = planned[-1] if planned else read_plan(self._store, committed[-1])
        # How weight versions are evaluated is no setting of an iteration.
        return {**resolved_in_force(self._store, plan), "evaluation": plan.config.get("evaluation")}

    @property
    def metrics(self) -> pa.Table:
        """A row for each committed iteration; docs/guide/metrics.md names the columns.

        What was not measured, or is no finite number, is null. `rollout/tokens_per_s` is there, too.
        """
        rows = committed_metrics(self._store)
        names = sorted({name for row in rows for name in row} - _KEYS.keys())
        kinds = _KEYS | dict.fromkeys(names, pa.float64())
        return pa.table({name: pa.array([row.get(name) for row in rows], type=kind) for name, kind in kinds.items()})

    def responses(self, iteration: int, *, grading: str | None = None) -> pa.Table:
        """The responses of a committed iteration, a row each; docs/guide/export.md names the columns.

        Takes the memory of all its tokens. grading: the rewards are those of this grading by `gleaner regrade`; None:
        the recorded ones. Raises LookupError for an iteration that is not committed, or that the grading does not have,
        and what reading raises.
        """
        plan = read_plan(self._store, self._committed(iteration))
        graded = None if grading is None else read_graded(self._store, grading, plan.iteration)
        return pa.concat_tables(rollout_tables(self._store, plan, self._decode, graded))

    def model(self, version: int | None = None) -> Any:
        """Return a weight version, by default the newest, as a transformers model on the CPU, in the stored dtype.

        Takes the disk space of a model during the load. Raises LookupError, with the stored versions, for a version
        that the run does not have, and the errors of `export_model`.
        """
        # The import takes seconds.
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        with TemporaryDirectory(prefix="gleaner-model-") as folder:
            export_model(self._store, Path(folder), SystemClock(), version=version)
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", local_files_only=True, trust_remote_code=False
            )

    @cached_property
    def _decode(self) -> Decode | None:
        return load_completion_decoder(self._store)

    def _committed(self, iteration: int) -> int:
        """The iteration's number; raises LookupError unless it is committed."""
        committed = self.iterations
        try:
            number = index(iteration)
        except TypeError:
            number = -1
        if number in committed:
            return number
        allowed = f"0 to {committed[-1]}, which are committed" if committed else "none, as none is committed yet"
        is_planned = number >= 0 and exists(self._store, layout.plan(number))
        known = f"; `gleaner view {self.url}` shows it as far as it goes" if is_planned else ""
        raise LookupError(f"iteration: value {iteration!r}; allowed: {allowed}{known}")
