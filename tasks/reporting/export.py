"""Export: the responses of a run as Parquet files, one per iteration, for pandas and DuckDB.

The source is the directory of the run, compacted or live; the only writes go to the given folder.
"""

import json
import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.journal.compaction import read_batches, read_parts, recorded
from storage.journal.responses import Response
from storage.journal.turns import added_messages, decode_turn
from storage.records import layout, model_files
from storage.records.gradings import GradedRecord, check_graded, read_graded
from storage.records.prompt_table import PromptRow, read_prompts
from storage.records.records import PlanRecord, SamplingParams
from storage.records.run import exists, is_trained, next_iteration, read_plan, read_run
from storage.stores.store import CorruptObject, ObjectStore
from storage.waiting import Progress, no_progress
from tasks.prompts.decode import Decode, open_completion_decoder, open_decoder

log = logging.getLogger(__name__)
# Without any of these files transformers makes a tokenizer that knows no word.
TOKENIZER_FILES = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"})
# The column of the weighted sums, and how the columns of single functions begin.
REWARD = "reward"
RANGE = re.compile(r"([0-9]{0,9}):([0-9]{0,9})|([0-9]{1,9})")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An exported file.

    Attributes:
        path: The Parquet file.
        iteration: The iteration.
        responses: How many responses of the plan were finished at the time of writing.
        planned: How many responses the plan has.
    """

    path: Path
    iteration: int
    responses: int
    planned: int


def parse_range(text: str, count: int) -> range:
    """Return the iterations among 0 to count - 1 that "a:b" (without b), "a:", ":b", ":" or "a" names.

    Raises ValueError for any other text, for an empty range, and for an iteration that the run does not have.
    """
    found = RANGE.fullmatch(text)
    if found is None:
        raise ValueError(f"iterations: value {text!r}; allowed: a:b (without b), a:, :b or a, counted from 0")
    first, end, single = found.groups()
    chosen = range(int(single), int(single) + 1) if single else range(int(first or 0), int(end or count))
    if not chosen or chosen[-1] >= count:
        raise ValueError(f"iterations: value {text!r}; allowed: the run has 0 to {count - 1}")
    return chosen


def export_rollouts(
    store: ObjectStore,
    iterations: str,
    folder: Path,
    *,
    grading: str | None = None,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> list[Exported]:
    """Write `iteration-<n>.parquet` into `folder` (made if missing) for every iteration that `iterations` names.

    An uncommitted iteration gives the responses that are finished. With `grading` the rewards are those of this
    grading, and only committed iterations count. Raises LookupError if the run has no iteration, or the grading lacks
    one, FileExistsError, which names the first existing file (then nothing is written), NotADirectoryError, ValueError
    for the range, and what reading raises. A file appears whole or not at all.
    """
    committed = next_iteration(store)
    count = committed + (grading is None and exists(store, layout.plan(committed)))
    if not count:
        raise LookupError(f"{store.url} holds no {'iteration' if grading is None else 'committed iteration'}")
    paths = {index: folder / f"iteration-{index:06d}.parquet" for index in parse_range(iterations, count)}
    if grading is not None:
        check_graded(store, grading, paths)
    present = [path for path in paths.values() if path.exists()]
    if present and not overwrite:
        raise FileExistsError(f"{present[0]} exists already; allowed: another folder, or --overwrite")
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; allowed: a folder, which is made if it is missing")
    folder.mkdir(parents=True, exist_ok=True)
    progress("reading the tokenizer", 0, 0)
    decode = load_completion_decoder(store)
    done: list[Exported] = []
    for index, path in paths.items():
        progress(f"exporting iteration {index}", len(done), len(paths))
        graded = None if grading is None else read_graded(store, grading, index)
        done.append(_export_iteration(store, read_plan(store, index), path, decode, graded))
    return done


def load_completion_decoder(store: ObjectStore) -> Decode | None:
    """A decoder from the tokens of a response to the text that rewards see, by the first plan; as `load_decoder`."""
    return load_decoder(store, "column completion is empty", read_plan(store, 0).sampling)


def load_decoder(store: ObjectStore, consequence: str, sampling: SamplingParams | None = None) -> Decode | None:
    """Return a decoder from token ids to text with the run's own tokenizer.

    sampling: of a plan, for the text that rewards see; None: for the text of all tokens. Returns None, with a
    warning that gives `consequence` and the reason, if the run's files make no tokenizer. Raises CorruptObject if
    the files differ from the list in run.json.
    """
    names = read_run(store).model_files
    notice = f"{consequence}: no tokenizer in {store.url}/{layout.MODEL}"
    if not TOKENIZER_FILES & names.keys():
        log.warning("%s (none of %s is there)", notice, ", ".join(sorted(TOKENIZER_FILES)))
        return None
    try:
        with model_files.downloaded(store) as directory:
            if sampling is None:
                return open_decoder(directory, special_tokens=True)
            return open_completion_decoder(directory, sampling)
    except CorruptObject:
        raise
    except Exception as error:  # noqa: BLE001 - the library that reads the files can raise anything
        log.warning("%s (%s)", notice, error)
        return None


def rollout_tables(
    store: ObjectStore, plan: PlanRecord, decode: Decode | None, graded: GradedRecord | None = None
) -> Iterator[pa.Table]:
    """Yield the finished responses of an iteration: a table without rows, then a table for each part.

    All tables have equal columns. graded: the rewards of a grading in place of the recorded ones; a response that
    failed has none. Raises LookupError if the iteration got its first rewards meanwhile, because the tables lack the
    columns, CorruptObject if a batch is missing or differs from the parts, or the grading names other responses, and
    the errors of reading.
    """
    if graded is None:
        yield from _recorded_tables(store, plan, decode)
        return
    places, found = {number: place for place, number in enumerate(graded.responses)}, 0
    for table in _recorded_tables(store, plan, decode):
        of_rows = [places.get(number) for number in table["response"].to_pylist()]
        found += sum(place is not None for place in of_rows)
        yield _with_rewards(table, graded, of_rows)
    if found != len(places):
        raise CorruptObject(layout.responses(plan.iteration), "the grading names responses that it does not have")


def _recorded_tables(store: ObjectStore, plan: PlanRecord, decode: Decode | None) -> Iterator[pa.Table]:
    prompts = read_prompts(store, plan)
    parts, count = read_parts(store, plan.iteration), 0
    _check_batches(store, plan)
    # Of a trained iteration every response is known; another grows while it is read.
    expected = len(recorded(store, plan)) if is_trained(store, plan.iteration) else None
    rows = next(parts, [])
    # The batches are read after the first part, so that they name every reward function that it has.
    graded = (response for batch in read_batches(store, plan.iteration) for response in batch.graded)
    functions = sorted({name for response in graded for name in response.rewards})
    yield _rollout_table(plan, prompts, [], decode, functions)
    while rows:
        if not all(set(row.rewards) <= set(functions) for row in rows):
            raise LookupError(f"iteration {plan.iteration} was graded while it was read; read it again")
        yield _rollout_table(plan, prompts, rows, decode, functions)
        count += len(rows)
        del rows  # before the next part is read
        rows = next(parts, [])
    if expected is not None and count != expected:
        reason = f"{count} responses are stored, and the batches name {expected}"
        raise CorruptObject(layout.responses(plan.iteration), reason)


def _with_rewards(table: pa.Table, graded: GradedRecord, places: Sequence[int | None]) -> pa.Table:
    """The table with the rewards of a grading; places: of each row in the grading, None: not graded."""
    first = table.column_names.index(REWARD)
    kept = table.drop_columns([name for name in table.column_names if f"{name}_".startswith(f"{REWARD}_")])
    columns: dict[str, Sequence[float | None]] = {
        REWARD: graded.reward,
        **{f"{REWARD}_{name}": values for name, values in sorted(graded.rewards.items())},
    }
    for offset, (name, values) in enumerate(columns.items()):
        column = pa.array([None if place is None else values[place] for place in places], type=pa.float64())
        kept = kept.add_column(first + offset, name, column)
    return kept


def _check_batches(store: ObjectStore, plan: PlanRecord) -> None:
    """Raise CorruptObject for a gap in the numbers of the batches: readers stop at the first gap."""
    keys = store.list(layout.batches(plan.iteration))
    absent = next((key for key in (layout.batch(plan.iteration, n) for n in range(len(keys))) if key not in keys), None)
    if absent is not None:
        raise CorruptObject(absent, f"it is missing, although {keys[-1]!r} is there")


def _rollout_table(
    plan: PlanRecord,
    prompts: Sequence[PromptRow],
    rows: Sequence[Response],
    decode: Decode | None,
    functions: Sequence[str],
) -> pa.Table:
    """Return a row per response, by number; docs/guide/export.md describes the columns.

    functions: the reward functions that get a column.
    """
    asked = [prompts[row.group] for row in rows]
    columns: dict[str, tuple[pa.DataType, list[Any]]] = {
        "iteration": (pa.int32(), [plan.iteration] * len(rows)),
        "response": (pa.int32(), [row.response for row in rows]),
        "group": (pa.int32(), [row.group for row in rows]),
        "prompt_id": (pa.string(), [row.prompt_id for row in rows]),
        "prompt": (pa.string(), [p.prompt if isinstance(p.prompt, str) else _as_json(p.prompt) for p in asked]),
        "columns": (pa.string(), [_as_json(prompt.columns) for prompt in asked]),
        "completion": (pa.string(), [decode(row.token_ids.tolist()) if decode else None for row in rows]),
        "finish_reason": (pa.string(), [row.finish.name.lower() for row in rows]),
        "length": (pa.int32(), [len(row.token_ids) for row in rows]),
        "weight_version": (pa.int32(), [row.weight_version for row in rows]),
        REWARD: (pa.float64(), [row.reward if plan.is_graded else None for row in rows]),
        **{f"{REWARD}_{name}": (pa.float64(), [row.rewards.get(name) for row in rows]) for name in functions},
    }
    arrays = {name: pa.array(values, type=kind) for name, (kind, values) in columns.items()}
    arrays["prompt_ids"] = _lists([np.array(prompt.token_ids, dtype=np.int32) for prompt in asked], pa.int32())
    arrays["token_ids"] = _lists([row.token_ids.astype(np.int32) for row in rows], pa.int32())
    arrays["logprobs"] = _lists([row.logprobs for row in rows], pa.float32())
    if plan.config.get("turns"):
        arrays["origins"] = _lists([np.array(row.origins, dtype=np.int32) for row in rows], pa.int32())
        arrays["messages"] = pa.array([_messages(row, decode) for row in rows], type=pa.string())
    return pa.table(arrays)


def _messages(row: Response, decode: Decode | None) -> str | None:
    """The turns of a response as JSON: the policy's texts, and what it read then; None without a tokenizer."""
    if decode is None:
        return None
    messages, start = [], 0
    for stretch, length in enumerate(row.origins):
        ids = row.token_ids[start : start + length].tolist()
        start += length
        if stretch % 2 == 0 and ids:
            messages.append({"role": "assistant", "content": decode(ids)})
            if stretch // 2 < len(row.events):
                turn = decode_turn(row.events[stretch // 2])
                messages += [{"role": "tool", "name": call.name, "content": call.result} for call in turn.calls]
                messages += added_messages(turn)
    return _as_json(messages)


def _lists(values: Sequence[npt.NDArray[Any]], item: pa.DataType) -> pa.Array:
    """An array of lists, built from buffers, because Python numbers would take ten times the memory."""
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
    flat = pa.array(np.concatenate(values) if values else [], type=item)
    return pa.LargeListArray.from_arrays(pa.array(offsets), flat)


def _export_iteration(
    store: ObjectStore, plan: PlanRecord, path: Path, decode: Decode | None, graded: GradedRecord | None
) -> Exported:
    # Two exports into one folder may overlap.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        count = _write_parts(unfinished, rollout_tables(store, plan, decode, graded))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return Exported(path=path, iteration=plan.iteration, responses=count, planned=plan.num_responses)


def _write_parts(path: Path, tables: Iterator[pa.Table]) -> int:
    """Write the responses part by part, and return how many there are; raises what `rollout_tables` raises."""
    import pyarrow.parquet as pq  # noqa: PLC0415 - only an export needs it

    count = 0
    # Without Arrow's own schema in the file, the columns are plain Parquet lists to every reader.
    with pq.ParquetWriter(path, next(tables).schema, compression="zstd", store_schema=False) as writer:
        for table in tables:
            writer.write_table(table)
            count += table.num_rows
            del table  # before the next part is read
    return count


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
