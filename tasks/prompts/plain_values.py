"""Conversion of dataset cells to plain JSON values, so that columns can be stored, sent to a process and compared."""

import math
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

# Far above what rows hold, far below what Python's own stack and readers of JSON can take.
DEPTH_MAX = 100


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """Convert `value` to None, bool, int, float, str, or a list or dict of these.

    Dates and times become ISO 8601 text, durations become seconds, and decimals become ints or floats if that is exact,
    else text. Raises TypeError, whose message begins with `where`, for anything else (bytes, images, ...), and
    ValueError for text that is no Unicode and for values nested more than DEPTH_MAX levels deep.
    """
    if value is None or isinstance(value, bool | int | float):
        # Subclasses (numpy's float64 and str_ among them) are converted to JSON's own types.
        return _builtin(value)
    if isinstance(value, str):
        return check_text(str(value), where)
    if depth == DEPTH_MAX:
        raise ValueError(f"{where[:80]}: nested more than {DEPTH_MAX} levels deep")
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist(), where, depth + 1)
    if isinstance(value, Mapping):
        names = [(check_text(str(key), f"{where}: a name"), item) for key, item in value.items()]
        return {name: plain(item, f"{where}.{name}", depth + 1) for name, item in names}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [plain(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(items)]
    if isinstance(value, datetime | date | time | timedelta | Decimal):
        return _plain_quantity(value)
    raise TypeError(f"{where}: a value of type {type(value).__name__} is not JSON; remove the column or convert it")


def without_nulls(value: Any) -> Any:
    """The value without the names, at every depth, whose value is null.

    Arrow gives all mappings of a column the same names, so a null may stand for an absent name. Nulls in lists are
    kept: Arrow adds none.
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def check_text(text: str, where: str) -> str:
    """Return `text`; raises ValueError, whose message begins with `where`, for a half of a surrogate pair.

    JSON and Arrow files can hold half of a pair, but no store, tokenizer or terminal takes the half.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise ValueError(f"{where}: {found!r} at character {error.start} is half of a character; remove it") from None
    return text


def _builtin(value: Any) -> Any:
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value


def _plain_quantity(value: datetime | date | time | timedelta | Decimal) -> int | float | str:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if value.is_finite() and value == value.to_integral_value():
        return int(value)
    as_float = float(value)
    return as_float if math.isfinite(as_float) and Decimal(repr(as_float)) == value else str(value)
