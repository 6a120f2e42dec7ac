from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.journal.shard import EVENT_BYTES_MAX, Finish, Origin, Row, decode_shard, encode_shard
from storage.records.framing import append_trailer
from storage.stores.store import CorruptObject

UINT32 = st.integers(0, 2**32 - 1)
LOGPROB = st.floats(-100, 0, width=32)


@st.composite
def rows(draw):
    origin = draw(st.sampled_from(Origin))
    foreign = (Finish.FAILED, Finish.AGAIN) if origin is Origin.POLICY else (Finish.ACTING, Finish.RELEASED)
    finish = draw(st.sampled_from([finish for finish in Finish if finish not in foreign]))
    count = 0 if finish is Finish.AGAIN else draw(st.integers(0, 20))
    ids = np.array(draw(st.lists(UINT32, min_size=count, max_size=count)), dtype=np.uint32)
    stated = count if origin is Origin.POLICY else 0
    logprobs = np.array(draw(st.lists(LOGPROB, min_size=stated, max_size=stated)), dtype=np.float32)
    event = None if origin is Origin.POLICY else draw(st.none() | st.binary(max_size=20))
    return Row(draw(UINT32), draw(UINT32), draw(UINT32), ids, logprobs, draw(UINT32), finish, origin, event)


def same(a: Row, b: Row) -> bool:
    return (
        (a.response, a.epoch, a.start, a.weight_version, a.finish, a.origin, a.event)
        == (b.response, b.epoch, b.start, b.weight_version, b.finish, b.origin, b.event)
        and np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.logprobs, b.logprobs)
    )


@pytest.mark.slow
@given(st.lists(rows(), max_size=8))
def test_round_trip(written):
    read = decode_shard("k", encode_shard(written))
    assert len(read) == len(written)
    assert all(same(a, b) for a, b in zip(written, read, strict=True))
    assert all(row.token_ids.dtype == np.uint32 and row.logprobs.dtype == np.float32 for row in read)


ROW = Row(3, 1, 5, np.arange(200, dtype=np.uint32), np.linspace(-1, 0, 200, dtype=np.float32), 7, Finish.STOP)


@given(st.data())
def test_any_truncation_or_flipped_byte_is_named_and_refused(data):
    body = bytearray(encode_shard([ROW]))
    place = data.draw(st.integers(0, len(body) - 1))
    broken = bytes(body[:place]) if data.draw(st.booleans()) else bytes(body)
    if len(broken) == len(body):
        body[place] ^= data.draw(st.integers(1, 255))
        broken = bytes(body)
    with pytest.raises(CorruptObject, match="'journal/x'"):
        decode_shard("journal/x", broken)


def test_plain_arrow_reads_a_shard():
    table = pa.ipc.open_stream(encode_shard([ROW])).read_all()
    assert table["token_ids"][0].as_py() == list(range(200))
    assert table["response"].to_pylist() == [3]


def test_a_newer_schema_version_is_refused_by_name():
    table = pa.ipc.open_stream(encode_shard([ROW])).read_all().replace_schema_metadata({b"gleaner.shard": b"2"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(CorruptObject, match="b'2'"):
        decode_shard("k", append_trailer(sink.getvalue().to_pybytes()))


def test_foreign_arrow_columns_are_refused():
    table = pa.table({"x": [1]}).replace_schema_metadata({b"gleaner.shard": b"1"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(CorruptObject, match="columns"):
        decode_shard("k", append_trailer(sink.getvalue().to_pybytes()))


def test_columns_of_different_lengths_are_refused_before_writing():
    with pytest.raises(ValueError, match="response 3"):
        encode_shard([Row(3, 1, 0, np.zeros(2, np.uint32), np.zeros(1, np.float32), 0, Finish.RUNNING)])


OBSERVATION = {"logprobs": np.zeros(0, np.float32), "origin": Origin.OBSERVATION}
REFUSED = [
    ({"logprobs": np.zeros(0, np.float32)}, r"200 token ids, 0 logprobs \(policy\)"),
    ({"origin": Origin.OBSERVATION}, r"200 token ids, 200 logprobs \(observation\)"),
    ({"event": b"{}"}, "an event in a row of the policy; allowed: in rows of observations"),
    ({"finish": Finish.FAILED}, "failed in a row of the policy; allowed: in rows of observations"),
    ({"finish": Finish.AGAIN}, "again in a row of the policy; allowed: in rows of observations"),
    (OBSERVATION | {"finish": Finish.ACTING}, "acting in an observation; allowed: in rows of the policy"),
    (OBSERVATION | {"finish": Finish.RELEASED}, "released in an observation; allowed: in rows of the policy"),
    (OBSERVATION | {"finish": Finish.AGAIN}, "it begins again with 200 token ids; allowed: none"),
    (OBSERVATION | {"event": bytes(EVENT_BYTES_MAX + 1)}, "an event of 1048577 bytes; allowed: 1048576"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_rows_whose_origin_and_columns_disagree_are_refused_by_writer_and_reader(changes, message, monkeypatch):
    wrong = replace(ROW, **changes)
    with pytest.raises(ValueError, match=f"response 3: .*{message}|response 3: {message}"):
        encode_shard([ROW, wrong])
    with monkeypatch.context() as patched:
        patched.setattr(Row, "lack", lambda _: None)
        body = encode_shard([ROW, wrong])
    with pytest.raises(CorruptObject, match=message) as caught:
        decode_shard("journal/x", body)
    assert caught.value.key == "journal/x"


@pytest.mark.parametrize(("column", "value"), [("finish", 7), ("origin", 2)])
def test_unknown_codes_are_refused_by_name(column, value):
    table = pa.ipc.open_stream(encode_shard([ROW])).read_all()
    index = table.schema.get_field_index(column)
    changed = table.set_column(index, table.schema.field(column), pa.array([value], type=pa.uint8()))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, changed.schema) as writer:
        writer.write_table(changed)
    with pytest.raises(CorruptObject, match=f"{column} .*{value} of response 3 is not one of"):
        decode_shard("k", append_trailer(sink.getvalue().to_pybytes()))


def test_what_ends_a_response():
    assert [mark for mark in Finish if mark.ends_response] == [Finish.STOP, Finish.LENGTH, Finish.FAILED]
    assert [mark.value for mark in Finish] == [0, 1, 2, 3, 4, 5, 6]
