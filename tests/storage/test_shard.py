import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.framing import append_trailer
from storage.shard import Finish, Row, decode_shard, encode_shard
from storage.store import CorruptObject

UINT32 = st.integers(0, 2**32 - 1)
LOGPROB = st.floats(-100, 0, width=32)


@st.composite
def rows(draw):
    count = draw(st.integers(0, 20))
    ids = np.array(draw(st.lists(UINT32, min_size=count, max_size=count)), dtype=np.uint32)
    logprobs = np.array(draw(st.lists(LOGPROB, min_size=count, max_size=count)), dtype=np.float32)
    return Row(draw(UINT32), draw(UINT32), draw(UINT32), ids, logprobs, draw(UINT32), draw(st.sampled_from(Finish)))


def same(a: Row, b: Row) -> bool:
    return (
        (a.response, a.epoch, a.start, a.weight_version, a.finish)
        == (b.response, b.epoch, b.start, b.weight_version, b.finish)
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
