"""A reader of the JSON objects of a run, written from docs/format.md section 3, independent of the production reader.

It builds the envelope again from the front and compares, where the production reader looks at the bytes from the back.
"""

import json
from typing import Any

from blake3 import blake3

from storage.records.records import BatchRecord, GradedResponse, Span
from storage.stores.store import CorruptObject

DIGITS = 32


def body_of(key: str, kind: str, data: bytes) -> dict[str, Any]:
    """The body of a JSON object; raises CorruptObject unless it is an object of `kind` for `key`, byte for byte."""
    body: dict[str, Any] = json.loads(data)["body"]
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = blake3(canonical.encode()).hexdigest()[:DIGITS]
    if data != f'{{"body":{canonical},"digest":"{digest}","format":1,"key":"{key}","kind":"{kind}"}}'.encode():
        raise CorruptObject(key, f"these are not the bytes of a {kind} of format 1 for this key")
    return body


def batch_of(key: str, data: bytes) -> BatchRecord:
    """The micro-batch in a JSON object; raises CorruptObject, and KeyError or TypeError for other fields."""
    body = body_of(key, "batch", data)
    lists = {name: tuple(map(_graded, body.pop(name))) for name in ("responses", "filtered")}
    told = {name: tuple(body.get(name, ())) for name in ("reward_errors", "given_up")}
    return BatchRecord(**body | lists | told)


def _graded(fields: dict[str, Any]) -> GradedResponse:
    return GradedResponse(**fields | {"lineage": tuple(Span(**span) for span in fields["lineage"])})
