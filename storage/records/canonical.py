"""Canonical JSON of dataclasses, and their strict reading: a value is understood wholly or not used."""

import json
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from storage.stores.store import CorruptObject

Value = TypeVar("Value")
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def encode(value: Any) -> bytes:
    """All fields of a dataclass as JSON: sorted keys, no white space, no character beyond ASCII.

    Half of a surrogate pair, which an exception's message may hold, becomes "?": no reader would take it.
    """
    document = _adapter(type(value)).dump_python(value, warnings=False)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    if "\\ud" in text:
        whole = json.dumps(document, ensure_ascii=False).encode(errors="replace")
        text = json.dumps(json.loads(whole), sort_keys=True, separators=(",", ":"))
    return text.encode()


def decode(value_type: type[Value], key: str, body: bytes) -> Value:
    """The dataclass in `body`, a part of the object `key`.

    Raises CorruptObject, which names `key` and the first unknown field or wrong type.
    """
    try:
        return _adapter(value_type).validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptObject(key, f"{where or value_type.__name__}: {first['msg']}") from None


def _adapter(value_type: type[Value]) -> TypeAdapter[Value]:
    if value_type not in _ADAPTERS:
        _ADAPTERS[value_type] = TypeAdapter(value_type)
    return _ADAPTERS[value_type]
