"""Tables of lengths: the same bytes for the same table, and nothing that is damaged or unknown is used."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load, save

from storage.digests import Hasher
from storage.records import layout
from storage.records.length_tables import (
    DOCUMENT,
    LengthTable,
    commit_lengths,
    decode_lengths,
    empty_table,
    encode_lengths,
    newest_lengths,
)
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject


def a_table(iteration: int = 3) -> LengthTable:
    rng = np.random.default_rng(iteration)
    return replace(
        empty_table(),
        iteration=iteration,
        learned=iteration + 1,
        prompts=np.array([3, 2**63, 2**64 - 1], dtype=np.uint64),
        mean=np.array([10, 20.5, 3], dtype=np.float32),
        deviation=np.array([1, np.nan, 0], dtype=np.float32),
        count=np.array([1, 1, 2], dtype=np.uint32),
        last_seen=np.array([3, 1, 2], dtype=np.uint32),
        weights=rng.normal(size=empty_table().weights.shape),
    )


def same(one: LengthTable, other: LengthTable) -> bool:
    return encode_lengths(one) == encode_lengths(other)


def document_of(body: bytes) -> dict:
    return json.loads(json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"][DOCUMENT])


def test_round_trip_and_equal_bytes():
    body = encode_lengths(a_table())
    assert encode_lengths(a_table()) == body
    decoded = decode_lengths("k", body)
    assert same(decoded, a_table())
    assert decoded.prompts.tolist() == [3, 2**63, 2**64 - 1]
    assert (decoded.iteration, decoded.learned) == (3, 4)
    assert same(
        decode_lengths("k", encode_lengths(replace(empty_table(), iteration=0))), replace(empty_table(), iteration=0)
    )


def test_every_flipped_byte_of_a_tensor_and_every_cut_is_found():
    body = encode_lengths(a_table())
    data = 8 + int.from_bytes(body[:8], "little")
    for place in (data, data + 1001, len(body) - 1):
        damaged = bytearray(body)
        damaged[place] ^= 1
        with pytest.raises(CorruptObject, match="'k'"):
            decode_lengths("k", bytes(damaged))
    for size in (0, 5, 8, data - 3, data, len(body) - 1):
        with pytest.raises(CorruptObject, match="not a table of lengths"):
            decode_lengths("k", body[:size])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3}, "format: value 3; this Gleaner reads 1 and 2"),
        ({"predictors": ["history"]}, "predictors: value"),
        ({"iteration": -1}, "iteration: value -1"),
        ({"learned": True}, "learned: value True"),
        ({"digest": "00"}, "do not match their digest"),
    ],
)
def test_another_document_is_refused_by_name(changes, message):
    body = encode_lengths(a_table())
    other = save(load(body), {DOCUMENT: json.dumps(document_of(body) | changes)})
    with pytest.raises(CorruptObject, match=message):
        decode_lengths("k", other)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weights", np.zeros(7), r"weights: float64\(7,\)"),
        ("mean", np.zeros(3, np.float32), "mean: value 0.0; allowed: above 0"),
        ("mean", np.array([1, np.inf, 1], np.float32), "mean: it holds numbers that are not finite"),
        ("count", np.zeros(3), r"count: float64\(3,\); allowed: uint32"),
        ("prompts", np.array([3, 3, 4], np.uint64), "prompts: 3 digests; allowed"),
        ("surprise", np.zeros(1), "surprise: it is unknown"),
        ("squares", None, "squares: it is missing"),
        ("gram", np.zeros((4, 4)), "gram: it is unknown"),
    ],
)
def test_other_tensors_are_refused_by_name(name, value, message):
    body = encode_lengths(a_table())
    arrays = load(body) | {name: value}
    other = save({n: a for n, a in arrays.items() if a is not None}, {DOCUMENT: json.dumps(document_of(body))})
    with pytest.raises(CorruptObject, match=message):
        decode_lengths("k", other)


def test_a_safetensors_object_of_somebody_else_is_refused():
    for metadata in (None, {"format": "pt"}, {DOCUMENT: "[]"}, {DOCUMENT: "{"}):
        with pytest.raises(CorruptObject):
            decode_lengths("k", save({"a": np.zeros(2)}, metadata))


def test_the_newest_before_an_iteration_that_can_be_read(caplog):
    store = MemoryStore()
    assert newest_lengths(store, 9) is None
    for iteration in (0, 1, 2, 3):
        assert commit_lengths(store, a_table(iteration))
    store.put("lengths/notes.txt", b"x")
    assert newest_lengths(store, 9).iteration == 3
    assert newest_lengths(store, 2).iteration == 1
    store.put(layout.lengths(3), b"damaged")
    store.put(layout.lengths(2), encode_lengths(a_table(1)))
    with caplog.at_level(logging.WARNING):
        assert newest_lengths(store, 9).iteration == 1
    assert "lengths/000003.safetensors" in caplog.text
    assert "is of iteration 1" in caplog.text


def test_of_two_tables_the_first_counts():
    store = MemoryStore()
    assert commit_lengths(store, a_table())
    assert commit_lengths(store, a_table())
    assert not commit_lengths(store, replace(a_table(), learned=1))
    assert newest_lengths(store, 4).learned == 4


def test_keys_and_iterations():
    assert layout.lengths_iteration(layout.lengths(12)) == 12
    assert layout.lengths_iteration(layout.lengths(1_234_567)) == 1_234_567
    assert layout.lengths_iteration("lengths/000001.json") is None


def test_of_a_table_of_format_1_the_rows_of_the_predictors_that_there_are_remain():
    table = replace(a_table(), high_ratio=np.array([1.5, 2.5, 4.5]))
    body = encode_lengths(table)
    arrays = load(body) | {"gram": np.eye(4), "moment": np.ones(4), "high_ratio": np.array([1.5, 2.5, 3.5, 4.5])}
    arrays |= {name: np.full((4, 3), np.nan) for name in ("recall", "rank_correlation")}
    hashed = Hasher()
    for name in sorted(arrays):
        hashed.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        hashed.update(arrays[name].tobytes())
    old = {"format": 1, "predictors": ["history", "ranker", "features", "none"], "digest": hashed.hexdigest()}
    assert same(decode_lengths("k", save(arrays, {DOCUMENT: json.dumps(document_of(body) | old)})), table)
    with pytest.raises(CorruptObject, match=r"predictors: value .*; allowed in format 1:"):
        decode_lengths("k", save(arrays, {DOCUMENT: json.dumps(document_of(body) | old | {"predictors": []})}))
