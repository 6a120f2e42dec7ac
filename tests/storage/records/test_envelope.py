"""Damaged and exchanged objects: each is refused by its key, and what is wrong is said."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import storage
from storage.journal.response_parts import ResponsesRecord
from storage.records import layout, records
from storage.records.canonical import unwrap, wrap
from storage.stores.store import CorruptObject
from storage.weights.manifest import Manifest
from tests.fleet_of_format_one import of_the_fleet
from tests.format_one import objects, of_the_crew, of_the_run, of_the_trainer

RECORDS = of_the_run() | of_the_crew() | of_the_trainer() | of_the_fleet()
TYPES = {record.KIND: type(record) for record in RECORDS.values()} | {
    kind.KIND: kind for kind in (Manifest, ResponsesRecord)
}
# A fleet is a store of its own.
STORED = {
    key.removeprefix("fleet/"): data
    for key, data in objects().items()
    if not key.startswith(layout.MODEL) and key.endswith(".json")
}
BY_KIND = {json.loads(data)["kind"]: key for key, data in STORED.items()}


def refused(kind: str, key: str, data: bytes) -> str:
    """Why the object is refused."""
    with pytest.raises(CorruptObject) as caught:
        records.decode(TYPES[kind], key, data)
    assert caught.value.key == key
    assert "\n" not in str(caught.value)
    return caught.value.reason


def test_there_is_an_object_of_every_kind():
    sources = [path.read_text(encoding="utf-8") for path in Path(storage.__file__).parent.rglob("*.py")]
    declared = [kind for source in sources for kind in re.findall(r'KIND: ClassVar\[str\] = "(.+)"', source)]
    assert sorted(declared) == sorted(set(declared)) == sorted(BY_KIND) == sorted(TYPES)


@pytest.mark.parametrize("kind", BY_KIND)
def test_an_undamaged_object_is_read_and_would_be_written_the_same(kind):
    key = BY_KIND[kind]
    record = records.decode(TYPES[kind], key, STORED[key])
    assert records.encode(key, record) == STORED[key]


@pytest.mark.parametrize("kind", BY_KIND)
def test_no_byte_may_change(kind):
    key = BY_KIND[kind]
    data = STORED[key]
    step = max(1, len(data) // 300)
    for position in [*range(0, len(data), step), *range(max(0, len(data) - 150), len(data))]:
        for flipped in (1, 0x20, 0x80):
            damaged = bytearray(data)
            damaged[position] ^= flipped
            refused(kind, key, bytes(damaged))


@pytest.mark.parametrize("kind", BY_KIND)
def test_no_byte_may_be_missing_or_added(kind):
    key = BY_KIND[kind]
    data = STORED[key]
    for damaged in (data[:-1], data[1:], data[: len(data) // 2], b"", data + b"\n", b" " + data, data + data):
        refused(kind, key, damaged)


def test_an_object_is_refused_under_every_other_key():
    for key, data in STORED.items():
        for other in STORED.keys() - {key}:
            kind = json.loads(data)["kind"]
            assert refused(kind, other, data) == f"key: it says {key!r}, expected {other!r}"


@pytest.mark.parametrize("kind", BY_KIND)
def test_another_kind_and_another_format_are_named(kind):
    key = BY_KIND[kind]
    other = "plan" if kind != "plan" else "claim"
    assert refused(other, key, STORED[key]) == f"kind: it says {kind!r}, expected {other!r}"
    later = STORED[key].replace(b'"format":1', b'"format":2')
    assert refused(kind, key, later) == "format 2; this version of Gleaner reads format 1"
    body = STORED[key].replace(b'"format":1', b'"format":1.0')
    assert "layout" in refused(kind, key, body)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"format":7,"anything":[]}', "format 7; this version of Gleaner reads format 1"),
        (b'{"config":{},"nonce":"x"}', "format: it is missing"),
        (b"[1]", "format: it is missing"),
        (b"not json", "its 8 bytes are no envelope"),
        (b'{"body":,"digest":"","format":1,"key":"k","kind":"plan"}', "no envelope"),
    ],
)
def test_what_is_no_envelope_is_told_apart(data, reason):
    assert reason in refused("plan", "k", data)


def test_white_space_and_another_order_are_refused():
    key = BY_KIND["claim"]
    found = json.loads(STORED[key])
    assert "exact layout" in refused("claim", key, json.dumps(found).encode())
    turned = json.dumps(dict(reversed(found.items())), separators=(",", ":")).encode()
    assert "exact layout" in refused("claim", key, turned)


@given(st.binary(max_size=200), st.from_regex(r"[A-Za-z0-9._-]{1,9}(/[A-Za-z0-9._-]{1,9}){0,2}", fullmatch=True))
def test_the_body_is_found_whatever_it_holds(body, key):
    data = wrap(key, "plan", body)
    assert unwrap(key, "plan", data) == body
    nested = wrap("outer", "run", data)
    assert unwrap("outer", "run", nested) == data


@given(st.binary(max_size=120))
def test_other_bytes_are_refused(data):
    with pytest.raises(CorruptObject):
        unwrap("k", "plan", data)


def test_no_production_code_encodes_a_record_without_storing_it_under_its_key():
    root = Path(storage.__file__).parents[1]
    sources = [*root.glob("storage/**/*.py"), *root.glob("tasks/**/*.py"), root / "gleaner.py"]
    assert [path.name for path in sources if "records.encode(" in path.read_text(encoding="utf-8")] == []
