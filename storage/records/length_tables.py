"""What a run has learned about the lengths of its responses, as one safetensors object per concluded iteration.

Format 2: a header with one metadata key, DOCUMENT (JSON: format, iteration, learned, predictors, digest), and the
tensors of LengthTable by field name, little-endian. The digest is of the tensors' bytes, because safetensors has none.
Equal tables have equal bytes, so that several attempts at a conclusion write the same object. Tables of format 1, with
one predictor and two tensors more, are read, too. This module stores numbers and does not know how predictors work.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from storage.digests import Hasher, digest_of
from storage.records import layout
from storage.records.run import read_run
from storage.stores.shortage import raise_shortage
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore, commit

log = logging.getLogger(__name__)
FORMAT = 2
DOCUMENT = "gleaner.lengths"
PREDICTORS = ("history", "ranker", "none")
# What a table of format 1 holds besides: a regression's sums, and the third row of every tensor by predictor.
_PREDICTORS_1, _TENSORS_1 = ("history", "ranker", "features", "none"), ("gram", "moment")
# Fixed in format 2, so that any reader of a table can continue from it.
QUANTILES = 33
FEATURES = 4
HASHED = 4096
RECENT = 3
PROMPTS_MAX = 1 << 18
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LengthTable:
    """The state of all length predictors after `iteration` was concluded.

    Attributes:
        learned: number of iterations behind the table.
        prompts: uint64 [n], digests of prompts, ascending; at most PROMPTS_MAX, the most recently seen.
        mean, deviation: float32 [n], of the lengths of a prompt's responses in tokens, averaged over epochs; deviation
            is NaN for a single response.
        count: uint32 [n], number of epochs of each prompt.
        last_seen: uint32 [n], last iteration of each prompt.
        quantiles: float64 [QUANTILES], of the groups' mean lengths, at (k + 0.5) / QUANTILES.
        weights, squares: float64 [HASHED + FEATURES], the ranker's weights and its summed squared gradients, n-grams
            first.
        high_ratio: float64 [predictors], the 90 % quantile of length / expectation.
        recall, rank_correlation: float64 [predictors, RECENT], of the last iterations, the newest last; NaN: not
            measured.
    """

    iteration: int
    learned: int
    prompts: npt.NDArray[np.uint64]
    mean: npt.NDArray[np.float32]
    deviation: npt.NDArray[np.float32]
    count: npt.NDArray[np.uint32]
    last_seen: npt.NDArray[np.uint32]
    quantiles: Floats
    weights: Floats
    squares: Floats
    high_ratio: Floats
    recall: Floats
    rank_correlation: Floats


_SCALARS = ("iteration", "learned")
_PER_PROMPT = {"prompts": np.uint64, "mean": np.float32, "deviation": np.float32, "count": np.uint32} | {
    "last_seen": np.uint32
}
_FIXED: dict[str, tuple[int, ...]] = {
    "quantiles": (QUANTILES,),
    "weights": (HASHED + FEATURES,),
    "squares": (HASHED + FEATURES,),
    "high_ratio": (len(PREDICTORS),),
    "recall": (len(PREDICTORS), RECENT),
    "rank_correlation": (len(PREDICTORS), RECENT),
}
_MAY_BE_NAN = ("deviation", "recall", "rank_correlation")


def empty_table() -> LengthTable:
    """The table of a run that has learned nothing yet."""
    arrays: dict[str, Any] = {name: np.zeros(0, kind) for name, kind in _PER_PROMPT.items()}
    arrays |= {name: np.zeros(shape) for name, shape in _FIXED.items()}
    for name in ("recall", "rank_correlation"):
        arrays[name].fill(np.nan)
    return LengthTable(iteration=-1, learned=0, **arrays)


def encode_lengths(table: LengthTable) -> bytes:
    """The table as a safetensors object; equal tables give equal bytes."""
    arrays = {name: np.ascontiguousarray(getattr(table, name)) for name in _tensor_names()}
    document = {
        "format": FORMAT,
        "iteration": table.iteration,
        "learned": table.learned,
        "predictors": PREDICTORS,
        "digest": _digest(arrays),
    }
    # One key only: safetensors does not keep the order of several keys.
    body: bytes = save(arrays, {DOCUMENT: json.dumps(document, sort_keys=True)})
    return body


def decode_lengths(key: str, body: bytes) -> LengthTable:
    """The table in `body`; raises CorruptObject, which names `key` and the first thing that is wrong."""
    try:
        arrays: dict[str, npt.NDArray[Any]] = load(body)
        size = int.from_bytes(body[:8], "little")
        document = json.loads(json.loads(body[8 : 8 + size])["__metadata__"][DOCUMENT])
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise_shortage(error)
        raise CorruptObject(key, f"not a table of lengths: {type(error).__name__}: {error}") from None
    document = document if isinstance(document, dict) else {}
    version, predictors = document.get("format"), document.get("predictors")
    if version not in (1, FORMAT):
        raise CorruptObject(key, f"format: value {version!r}; this Gleaner reads 1 and {FORMAT}")
    wanted = list(PREDICTORS if version == FORMAT else _PREDICTORS_1)
    if predictors != wanted:
        raise CorruptObject(key, f"predictors: value {predictors!r}; allowed in format {version}: {wanted!r}")
    scalars: dict[str, Any] = {name: document.get(name) for name in _SCALARS}
    for name, value in scalars.items():
        if type(value) is not int or value < 0:
            raise CorruptObject(key, f"{name}: value {value!r}; allowed: a whole number from 0 on")
    digest = _digest(arrays)
    _check(key, arrays := arrays if version == FORMAT else _of_format_1(arrays))
    if document.get("digest") != digest:
        raise CorruptObject(key, "its tensors do not match their digest")
    named: dict[str, Any] = scalars | arrays
    return LengthTable(**named)


def _of_format_1(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a table of format 1 that format 2 has, with the rows of its predictors."""
    kept = {name: array for name, array in arrays.items() if name not in _TENSORS_1}
    rows = [_PREDICTORS_1.index(name) for name in PREDICTORS]
    for name in ("high_ratio", "recall", "rank_correlation"):
        if name in kept and len(kept[name].shape) and len(kept[name]) == len(_PREDICTORS_1):
            kept[name] = kept[name][rows]
    return kept


def newest_lengths(store: ObjectStore, before: int) -> LengthTable | None:
    """The newest readable table of an iteration below `before`; None if there is none.

    An unreadable table is logged and passed over: planning can do without it.
    """
    for key in reversed(store.list(layout.LENGTHS)):
        iteration = layout.lengths_iteration(key)
        if iteration is None or iteration >= before:
            continue
        try:
            table = decode_lengths(key, store.get(key))
        except (CorruptObject, ObjectMissing) as error:
            log.warning("a table of learned lengths is passed over: %s", error)
            continue
        if table.iteration == iteration:
            return table
        log.warning("a table of learned lengths is passed over: %r is of iteration %d", key, table.iteration)
    return None


def known_lengths(store: ObjectStore) -> LengthTable | None:
    """The table that a run has of another run, before its own iterations; None without one that is readable."""
    try:
        origin = read_run(store).prompts_origin
        if origin is None or origin.lengths is None:
            return None
        key = layout.known_lengths(origin.lengths)
        return decode_lengths(key, store.get(key))
    except (CorruptObject, ObjectMissing) as error:
        log.warning("the lengths of another run are passed over: %s", error)
        return None


def store_known_lengths(store: ObjectStore, table: LengthTable) -> None:
    """Store a table of another run under its content's name; raises CorruptObject for other bytes there."""
    body = encode_lengths(table)
    key = layout.known_lengths(digest_of(body))
    if not commit(store, key, body):
        raise CorruptObject(key, "it holds other bytes than its name says")


def commit_lengths(store: ObjectStore, table: LengthTable) -> bool:
    """Create the table of its iteration.

    False if another process stored a different table first; then the stored table is the valid one.
    """
    return commit(store, layout.lengths(table.iteration), encode_lengths(table))


def _tensor_names() -> tuple[str, ...]:
    return tuple(item.name for item in fields(LengthTable) if item.name not in _SCALARS)


def _digest(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    hashed = Hasher()
    for name in sorted(arrays):
        hashed.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        hashed.update(arrays[name].tobytes())
    return hashed.hexdigest()


def _check(key: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Check names, dtypes, shapes, and what every reader relies on; raises CorruptObject."""
    if set(arrays) != set(_tensor_names()):
        odd = min(set(arrays) ^ set(_tensor_names()))
        raise CorruptObject(key, f"{odd}: it is {'unknown' if odd in arrays else 'missing'}")
    number = arrays["prompts"].size
    expected = {name: (kind, (number,)) for name, kind in _PER_PROMPT.items()}
    for name, (kind, shape) in (expected | {n: (np.float64, s) for n, s in _FIXED.items()}).items():
        array = arrays[name]
        if array.dtype != kind or array.shape != shape:
            raise CorruptObject(key, f"{name}: {array.dtype}{array.shape}; allowed: {np.dtype(kind)}{shape}")
        if name not in _MAY_BE_NAN and not np.isfinite(array).all():
            raise CorruptObject(key, f"{name}: it holds numbers that are not finite")
    if number > PROMPTS_MAX or np.any(arrays["prompts"][1:] <= arrays["prompts"][:-1]):
        raise CorruptObject(key, f"prompts: {number} digests; allowed: up to {PROMPTS_MAX}, ascending")
    if np.any(arrays["mean"] <= 0):
        raise CorruptObject(key, f"mean: value {arrays['mean'].min()}; allowed: above 0")
