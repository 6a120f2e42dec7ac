"""The source of a script's data set: `load_dataset`, `load_from_disk` and calls of the data set's methods.

Methods that choose or order rows are followed. Methods that change rows raise NoLiteral, because a run cannot read the
result.
"""

import ast
import re
from dataclasses import dataclass, replace
from typing import Any

from tasks.adopting.script_names import Binding
from tasks.adopting.script_values import NoLiteral, ScriptValues, called, source

_FILES = ("json", "parquet", "csv")
_READING = frozenset({"cache_dir", "download_mode", "keep_in_memory", "num_proc", "streaming", "token"})
_READING_REMOTE = frozenset({"trust_remote_code", "verification_mode", "storage_options"})
_SAME_ROWS = frozenset({"remove_columns", "with_format", "set_format", "flatten_indices", "to_iterable_dataset"})
_SPLIT = re.compile(r"(\w+)(?:\[:(\d+)\])?")
_DEPTH_MAX = 40


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a data set, in the words of the section `data`.

    Attributes:
        source: file, folder or id of the data set.
        subset: configuration of the data set.
        split: split of the data set.
        revision: revision on the hub.
        limit: number of rows from the start; None: all.
        prompt_column: column of the prompts; None: the default.
        is_file: True for a single file, which has no splits.
        is_shuffled: True after a shuffle.
    """

    source: str
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    limit: int | None = None
    prompt_column: str | None = None
    is_file: bool = False
    is_shuffled: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the section `data` that are not None."""
        names = ("source", "subset", "split", "revision", "limit", "prompt_column")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def rows_of(values: ScriptValues, node: ast.expr) -> Rows:
    """The rows of a data set's expression; raises NoLiteral with advice to the user."""
    return _rows(values, node, None, 0)


def _rows(values: ScriptValues, node: ast.expr, before: int | None, depth: int) -> Rows:
    if depth > _DEPTH_MAX:
        raise NoLiteral("it is nested too deeply")
    if isinstance(node, ast.Name):
        bound = _last(values, node, before)
        assert isinstance(bound.value, ast.expr)
        return _rows(values, bound.value, bound.line, depth + 1)
    if isinstance(node, ast.Subscript):
        return _part(_rows(values, node.value, before, depth + 1), values.value(node.slice))
    if isinstance(node, ast.Call) and called(node.func) == "load_dataset":
        return _loaded(values, node)
    if isinstance(node, ast.Call) and called(node.func) == "load_from_disk" and len(node.args) == 1:
        return Rows(source=_text(values, node.args[0]))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _behind(values, node, _rows(values, node.func.value, before, depth + 1), node.func.attr)
    raise NoLiteral(f"{source(node)} is no data set that can be named: save it with save_to_disk, and name that")


def _last(values: ScriptValues, name: ast.Name, before: int | None) -> Binding:
    """The last binding of a name above its use, in a script that runs from top to bottom; raises NoLiteral."""
    found = values.names.found(name)
    if found is None:
        raise NoLiteral(f"{name.id} is given no value")
    scope, bindings = found
    if any(each.value is None or not each.is_certain for each in bindings):
        lines = ", ".join(str(each.line) for each in bindings)
        raise NoLiteral(f"{name.id} is not always the same (lines {lines}): save it with save_to_disk, and name that")
    limit = before if before is not None else name.lineno
    is_here = scope is values.names.scope_of(name)
    earlier = [each for each in bindings if not is_here or each.line < limit]
    if not earlier or not isinstance(earlier[-1].value, ast.expr):
        raise NoLiteral(f"{name.id} is no data set that can be named: save it with save_to_disk, and name that")
    return earlier[-1]


def _text(values: ScriptValues, node: ast.expr) -> str:
    found = values.value(node)
    if not isinstance(found, str):
        raise NoLiteral(f"{source(node)} is no text")
    return found


def _loaded(values: ScriptValues, call: ast.Call) -> Rows:
    """The rows of `load_dataset(path, name, split=..., revision=..., data_files=...)`."""
    given = dict(zip(("path", "name"), call.args, strict=False))
    if len(call.args) > 2:
        raise NoLiteral(f"{source(call)} has more than two arguments by position")
    for keyword in call.keywords:
        if keyword.arg is None:
            raise NoLiteral(f"{source(call)} has arguments that are no literals")
        given[keyword.arg] = keyword.value
    if unknown := set(given) - {"path", "name", "split", "revision", "data_files"} - _READING - _READING_REMOTE:
        raise NoLiteral(f"load_dataset has {', '.join(sorted(unknown))}: save the rows with save_to_disk")
    known = {name: values.value(given[name]) for name in ("path", "name", "split", "revision") if name in given}
    if any(each is not None and not isinstance(each, str) for each in known.values()) or not known.get("path"):
        raise NoLiteral(f"{source(call)} names no data set")
    path, split = known["path"], known.get("split")
    if "data_files" in given:
        files = values.value(given["data_files"])
        files = files.get("train") if isinstance(files, dict) and [*files] == ["train"] else files
        files = files[0] if isinstance(files, list) and len(files) == 1 else files
        if path not in _FILES or not isinstance(files, str) or "://" in files or "*" in files or known.get("name"):
            raise NoLiteral(f"{source(call)} is no single file: save its rows with save_to_disk, and name that")
        rows = Rows(source=files, is_file=True)
    else:
        rows = Rows(source=path, subset=known.get("name"), revision=known.get("revision"))
    return rows if split is None else _part(rows, split)


def _part(rows: Rows, split: object) -> Rows:
    """One split of rows, or its first rows: `train`, `train[:1000]`."""
    match = _SPLIT.fullmatch(split) if isinstance(split, str) else None
    if match is None or rows.split is not None:
        raise NoLiteral(f"{split!r} of {rows.source} is no split or its first rows: save it with save_to_disk")
    if rows.is_file and match[1] != "train":
        raise NoLiteral(f"{rows.source} has no split {match[1]!r}")
    found = rows if rows.is_file else replace(rows, split=match[1])
    return found if match[2] is None else _first(found, int(match[2]))


def _first(rows: Rows, count: int) -> Rows:
    if rows.is_shuffled:
        raise NoLiteral(f"it takes rows of {rows.source} after shuffling them: save them with save_to_disk")
    return replace(rows, limit=count if rows.limit is None else min(count, rows.limit))


def _behind(values: ScriptValues, call: ast.Call, rows: Rows, method: str) -> Rows:
    """The rows after a method of a data set; raises NoLiteral for a method that changes rows."""
    if method in _SAME_ROWS:
        return rows
    if method == "shuffle":
        return replace(rows, is_shuffled=True)
    if method in ("select", "take") and len(call.args) == 1 and not call.keywords:
        count = _count(values, call.args[0]) if method == "select" else values.value(call.args[0])
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return _first(rows, count)
    if method == "rename_column" and len(call.args) == 2 and values.value(call.args[1]) == "prompt":
        return replace(rows, prompt_column=_text(values, call.args[0]))
    what = f".{method}(...) on line {call.end_lineno or call.lineno} makes other rows of {rows.source}"
    raise NoLiteral(f"{what}: save them with save_to_disk, and name that directory")


def _count(values: ScriptValues, node: ast.expr) -> Any:
    """The n of `range(n)`; None for any other rows."""
    is_range = isinstance(node, ast.Call) and called(node.func) == "range" and not node.keywords
    if not is_range or not isinstance(node, ast.Call):
        return None
    numbers = [values.value(each) for each in node.args]
    if len(numbers) == 1:
        return numbers[0]
    return numbers[1] if len(numbers) == 2 and numbers[0] == 0 else None
