"""Canonical JSON of dataclasses, their strict reading, and the envelope of every JSON object of a run.

A value is understood wholly or not used. The envelope states kind, key, format and the digest of the body; the layout
is exact, for a reader to find the body without parsing (docs/format.md section 3).
"""

import json
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from storage.digests import DIGEST_BYTES, digest_of
from storage.stores.store import CorruptObject

Value = TypeVar("Value")
FORMAT_VERSION = 1
_HEAD = b'{"body":'
_DIGEST = b',"digest":"'
_DIGEST_LENGTH = 2 * DIGEST_BYTES
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


def wrap(key: str, kind: str, body: bytes) -> bytes:
    """The object to store under `key`; `body` is canonical JSON."""
    return b"".join((_HEAD, body, _DIGEST, digest_of(body).encode(), _end(key, kind)))


def unwrap(key: str, kind: str, data: bytes) -> bytes:
    """The body of the object that was read from `key`.

    Raises CorruptObject with `key` and the first fault: of the layout, the format, the kind, the key or the digest.
    """
    end = _end(key, kind)
    stated = len(data) - len(end) - _DIGEST_LENGTH
    split = stated - len(_DIGEST)
    if split < len(_HEAD) or not (data.startswith(_HEAD) and data.startswith(_DIGEST, split) and data.endswith(end)):
        raise CorruptObject(key, _why_not(key, kind, data))
    body = data[len(_HEAD) : split]
    if digest_of(body).encode() != data[stated : stated + _DIGEST_LENGTH]:
        raise CorruptObject(key, "digest: its body does not match it")
    return body


def _end(key: str, kind: str) -> bytes:
    """What follows the digest. A key holds nothing that JSON escapes."""
    return f'","format":{FORMAT_VERSION},"key":"{key}","kind":"{kind}"}}'.encode()


def _why_not(key: str, kind: str, data: bytes) -> str:
    """Why the bytes are not the envelope of `kind` for `key`.

    Every format, whatever its layout, states its number in the member `format`.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return f"its {len(data)} bytes are no envelope: truncated, damaged, or not ours"
    if not isinstance(found, dict) or "format" not in found:
        return "format: it is missing, so this is no object of a run"
    expected = {"format": FORMAT_VERSION, "kind": kind, "key": key}
    wrong = next((name for name, value in expected.items() if found.get(name) != value), None)
    if wrong == "format":
        return f"format {found['format']!r}; this version of Gleaner reads format {FORMAT_VERSION}"
    if wrong is not None:
        return f"{wrong}: it says {found.get(wrong)!r}, expected {expected[wrong]!r}"
    return "its envelope is not in the exact layout of format 1"
