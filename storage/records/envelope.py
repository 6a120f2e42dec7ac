"""The envelope of every JSON object of a run: kind, key, format, and the digest of the body.

The layout is exact, for a reader to find the body without parsing (docs/format.md section 3). This module knows bytes
and no meaning of a body.
"""

import json

from storage.digests import DIGEST_BYTES, digest_of
from storage.stores.store import CorruptObject

FORMAT_VERSION = 1
_HEAD = b'{"body":'
_DIGEST = b',"digest":"'
_DIGEST_LENGTH = 2 * DIGEST_BYTES


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
