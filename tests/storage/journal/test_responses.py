"""The object with an iteration's responses: exact to the last bit, readable by any Arrow reader, never half read."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from storage.journal import responses
from storage.journal.responses import PLANES, Response, decode_responses, encode_responses, join_planes, split_planes
from storage.journal.shard import EVENT_BYTES_MAX, Finish, Row, encode_shard
from storage.records.framing import append_trailer
from storage.stores.store import CorruptObject


def a_response(number, token_ids, logprobs=None, **changes):
    ids = np.array(token_ids, dtype=np.uint32)
    probabilities = np.full(len(ids), -0.5, dtype=np.float32) if logprobs is None else logprobs
    fields = {
        "group": number // 2,
        "prompt_id": f"p{number // 2}",
        "finish": Finish.STOP,
        "reward": 1.0,
        "rewards": {"exact": 1.0, "style": None},
        "weight_version": 3,
        "spans": (len(ids),),
        "origins": (len(ids),),
        "events": (),
    }
    return Response(response=number, token_ids=ids, logprobs=probabilities, **(fields | changes))


ROWS = st.lists(
    st.tuples(
        arrays.arrays(np.uint32, st.shared(st.integers(0, 9), key="n")),
        arrays.arrays(np.uint32, st.shared(st.integers(0, 9), key="n")),  # any bits are a float, NaNs too
        st.sampled_from([Finish.STOP, Finish.LENGTH]),
        st.floats(allow_nan=False),
        st.dictionaries(st.text(max_size=4), st.none() | st.floats(allow_nan=False), max_size=3),
    ),
    max_size=5,
)


@pytest.mark.slow
@given(ROWS)
def test_what_is_read_is_what_was_written_to_the_last_bit(cases):
    rows = [
        a_response(number, ids, bits.view(np.float32), finish=finish, reward=reward, rewards=rewards)
        for number, (ids, bits, finish, reward, rewards) in enumerate(cases)
    ]
    again = decode_responses("k", encode_responses(rows))
    assert [row.response for row in again] == list(range(len(rows)))
    assert all(a.equals(b) for a, b in zip(rows, again, strict=True))
    assert all(row.token_ids.dtype == np.uint32 and row.logprobs.dtype == np.float32 for row in again)


def test_rows_that_differ_anywhere_are_not_equal():
    row = a_response(0, [1, 2, 3])
    others = [
        a_response(1, [1, 2, 3], group=0, prompt_id="p0"),
        a_response(0, [1, 2, 4]),
        a_response(0, [1, 2, 3], origins=(1, 0, 2)),
        a_response(0, [1, 2, 3], events=(b"{}",)),
        a_response(0, [1, 2]),
        a_response(0, [1, 2, 3], np.array([-0.5, -0.5, -0.50000006], dtype=np.float32)),
        *(
            a_response(0, [1, 2, 3], **change)
            for change in ({"finish": Finish.LENGTH}, {"reward": 0.5}, {"spans": (1, 2)})
        ),
        *(a_response(0, [1, 2, 3], **change) for change in ({"rewards": {}}, {"weight_version": 4}, {"group": 1})),
    ]
    assert row.equals(a_response(0, [1, 2, 3]))
    assert [row.equals(other) for other in others] == [False] * len(others)


@pytest.mark.parametrize(("largest", "kind"), [(65_535, pa.uint16()), (65_536, pa.uint32())])
def test_any_arrow_reader_reads_the_token_ids(largest, kind):
    body = encode_responses([a_response(0, [3, largest]), a_response(1, [])])
    table = pa.ipc.open_stream(body).read_all()
    assert table.column("token_ids").to_pylist() == [[3, largest], []]
    assert table.schema.field("token_ids").type.value_type == kind
    assert table.column("prompt_id").to_pylist() == ["p0", "p0"]
    assert table.column("rewards").to_pylist() == [[("exact", 1.0), ("style", None)]] * 2


def test_the_planes_are_the_bytes_of_little_endian_floats():
    values = np.array([-1.5, -0.1], dtype=np.float32)
    body = encode_responses([a_response(0, [1, 2], values)])
    table = pa.ipc.open_stream(body).read_all()
    cells = [table.column(name)[0].as_py() for name in PLANES]
    assert [bytes(cell[index] for cell in cells) for index in range(2)] == [value.tobytes() for value in values]
    assert np.array_equal(join_planes(split_planes(values)), values)


def test_long_iterations_are_written_in_parts(monkeypatch):
    monkeypatch.setattr(responses, "TOKENS_PER_BATCH", 8)
    rows = [a_response(number, range(number + 1)) for number in range(9)]
    body = encode_responses(rows)
    assert len(pa.ipc.open_stream(body).read_all().to_batches()) > 3
    assert all(a.equals(b) for a, b in zip(rows, decode_responses("k", body), strict=True))


def test_equal_rows_are_equal_bytes():
    rows = [a_response(number, range(9)) for number in range(3)]
    assert encode_responses(rows) == encode_responses(rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (a_response(4, [1], reward=None), "response 4: reward None with finish stop; allowed: one"),
        (a_response(4, [1], finish=Finish.FAILED), "response 4: reward 1.0 with finish failed; allowed: none"),
        (a_response(4, [1], np.zeros(2, dtype=np.float32)), "response 4: 1 token ids of the policy, 2 logprobs"),
        (a_response(4, [1, 2], origins=(1, 1)), "response 4: 1 token ids of the policy, 2 logprobs"),
        (a_response(4, [1, 2], origins=()), r"response 4: origins \(\) of 2 token ids"),
        (a_response(4, [1, 2], origins=(2, 1)), r"response 4: origins \(2, 1\) of 2 token ids"),
        (a_response(4, [1, 2], spans=(1,)), r"response 4: spans \(1,\) of 2 token ids"),
        (
            a_response(4, [1], events=(bytes(EVENT_BYTES_MAX + 1),)),
            "response 4: an event of 1048577 bytes; allowed: 1048576",
        ),
    ],
)
def test_what_cannot_stand_for_a_journal_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        encode_responses([row])


def test_damage_anywhere_is_noticed():
    body = encode_responses([a_response(0, [1, 2, 3])])
    for cut in range(0, len(body), 7):
        with pytest.raises(CorruptObject, match="'k' is corrupt"):
            decode_responses("k", body[:cut])
    for place in range(0, len(body), 7):
        changed = bytearray(body)
        changed[place] ^= 1
        with pytest.raises(CorruptObject):
            decode_responses("k", bytes(changed))


def test_another_kind_of_object_is_refused_by_name():
    row = Row(0, 1, 0, np.zeros(1, np.uint32), np.zeros(1, np.float32), 0, Finish.STOP)
    with pytest.raises(CorruptObject, match=r"gleaner\.shard"):
        decode_responses("k", encode_shard([row]))
    with pytest.raises(CorruptObject, match="not an Arrow stream"):
        decode_responses("k", append_trailer(b"not arrow at all"))


def change_column(name, values):
    """A well-framed object in which one column is another."""
    table = pa.ipc.open_stream(encode_responses([a_response(0, [1, 2, 3])])).read_all()
    index = table.schema.get_field_index(name)
    table = table.set_column(index, table.schema.field(name), pa.array(values, type=table.schema.field(name).type))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return append_trailer(sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("logprob_byte_2", [b"ab"], "logprob_byte_0 and logprob_byte_2 have different lengths"),
        ("spans", [[2, 2]], r"response 0: spans \(2, 2\) of 3 token ids"),
        ("origins", [[2]], r"response 0: origins \(2,\) of 3 token ids"),
        ("origins", [[1, 2]], "response 0: 1 token ids of the policy, 3 logprobs"),
        ("events", [[bytes(EVENT_BYTES_MAX + 1)]], "response 0: an event of 1048577 bytes; allowed: 1048576"),
        ("finish", [0], r"finish code 0 of response 0; allowed: 1 \(stop\), 2 \(length\)"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(name, values, message):
    assert len(decode_responses("k", change_column("spans", [[2, 1]]))) == 1
    with pytest.raises(CorruptObject, match=message):
        decode_responses("k", change_column(name, values))


def test_a_conversation_with_an_environment_comes_back():
    logprobs = np.array([-0.5, -0.25, -0.125], dtype=np.float32)
    rows = [
        a_response(0, [1, 2, 3, 4, 5, 6], logprobs, origins=(2, 3, 1), events=(b'{"turn":0}', b"")),
        a_response(1, [7, 8]),
    ]
    again = decode_responses("k", encode_responses(rows))
    assert all(a.equals(b) for a, b in zip(rows, again, strict=True))
    assert again[0].logprobs.tolist() == logprobs.tolist()
    assert (again[1].origins, again[1].events) == ((2,), ())
