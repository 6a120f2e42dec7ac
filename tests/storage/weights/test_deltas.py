import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.weights.deltas import CHUNK, SEGMENT, apply, encode
from tests.covering import covering


def applied(delta: bytes, base: bytes, item_bytes: int) -> bytes:
    data = bytearray(base)
    apply(delta, memoryview(data), item_bytes)
    return bytes(data)


@given(
    st.sampled_from([1, 2, 4, 8]).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.integers(0, 40).flatmap(
                lambda n: st.tuples(st.binary(min_size=n * size, max_size=n * size), st.binary(max_size=n * size))
            ),
        )
    )
)
def test_any_bytes_round_trip(drawn):
    """Whatever the bits mean: every NaN pattern, infinity and negative zero is one of them."""
    size, (base, changes) = drawn
    new = changes + base[len(changes) :]
    assert applied(encode(base, new, size), base, size) == new


@given(
    st.integers(1, 3 * SEGMENT + 7).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=20), st.integers(0, 99))
    )
)
def test_gaps_of_any_length(drawn):
    length, indices, seed = drawn
    base = np.random.default_rng(seed).integers(0, 1 << 16, length, dtype=np.uint16)
    new = base.copy()
    new[list(indices)] += np.arange(1, len(indices) + 1, dtype=np.uint16)
    assert applied(encode(base.tobytes(), new.tobytes(), 2), base.tobytes(), 2) == new.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("item_bytes", "length", "share"),
    covering([1, 2, 4, 8], [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + SEGMENT + 3], [0.0, 0.01, 1.0]),
)
def test_tensors_of_several_chunks(item_bytes, length, share):
    rng = np.random.default_rng(length)
    base = rng.integers(0, 1 << 8, length, dtype=np.uint8).astype(f"<u{item_bytes}")
    new = base + (rng.random(length) < share).astype(base.dtype)
    new[[0, length - 1]] -= 1
    assert applied(encode(base.data.cast("B"), new.data.cast("B"), item_bytes), base.tobytes(), item_bytes) == (
        new.tobytes()
    )


def test_sparse_steps_of_one_unit_take_few_bytes():
    rng = np.random.default_rng(0)
    base = (rng.normal(0, 0.02, CHUNK).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = base.copy()
    changed = rng.random(CHUNK) < 0.01
    new[changed] += rng.choice(np.array([1, 65535], np.uint16), int(changed.sum()))
    assert len(encode(base.tobytes(), new.tobytes(), 2)) < 0.01 * base.nbytes


def test_nothing_changed():
    assert applied(encode(b"", b"", 2), b"", 2) == b""
    assert applied(encode(b"abcd", b"abcd", 4), b"abcd", 4) == b"abcd"


def forged(raw: bytes, length: int | None = None) -> bytes:
    body = pa.Codec("zstd").compress(raw, asbytes=True)
    return (len(raw) if length is None else length).to_bytes(8, "little") + body


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        (b"", "counts of 1 segments|not zstd"),
        (b"\0" * 8 + b"no zstd", "not zstd"),
        (forged(b"\1\0\0\0" + b"\0\0" + b"\2\0")[:-1], "not zstd"),
        (forged(b"\1\0\0\0" + b"\0\0" + b"\2\0", 7), "not zstd"),
        (forged(b"\0" * 1000), "1000 bytes are more than any difference of 4 elements"),
        (forged(b"\1"), "do not hold the counts of 1 segments"),
        (forged(b"\2\0\0\0" + b"\0\0" + b"\2\0"), "do not hold 2 differences"),
        (forged(b"\1\0\0\0" + b"\4\0" + b"\2\0"), "beyond the end"),
        (forged(b"\2\0\0\0" + b"\3\0\0\0" + b"\2\2\0\0"), "beyond the end"),
    ],
)
def test_malformed_differences_are_refused(delta, message):
    with pytest.raises(ValueError, match=message):
        applied(delta, b"\0" * 8, 2)


@given(st.binary(max_size=60), st.integers(0, 60))
def test_no_bytes_do_anything_but_apply_or_be_refused(raw, length):
    for delta in (raw, forged(raw), forged(raw, length)):
        try:
            made = applied(delta, bytes(64), 4)
        except ValueError:
            continue
        assert len(made) == 64
