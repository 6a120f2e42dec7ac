"""The stored scores of a micro-batch: what is written is read, and what does not fit is refused by name."""

from dataclasses import replace

import numpy as np
import pytest

from storage.records.teacher_scores import ScoredResponse, decode_scores, encode_scores
from storage.stores.store import CorruptObject

KEY = "iterations/000000/teacher/000000.arrow"


def row(response, tokens, width, teacher="teacher"):
    generator = np.random.default_rng(response)
    return ScoredResponse(
        response=response,
        teacher=teacher,
        logprobs=-generator.random(tokens, dtype=np.float32),
        agrees=generator.random(tokens) < 0.5,
        head_ids=generator.integers(0, 1 << 20, (tokens, width)).astype(np.uint32),
        head_logprobs=-generator.random((tokens, width), dtype=np.float32),
    )


@pytest.mark.parametrize("width", [0, 1, 3])
def test_scores_are_read_back_to_the_bit(width):
    rows = [row(4, 7, width), row(1, 1, width, "math"), row(9, 3, width)]
    found = decode_scores(KEY, encode_scores(rows))
    for expected, each in zip(rows, found, strict=True):
        assert (each.response, each.teacher) == (expected.response, expected.teacher)
        for name in ("logprobs", "agrees", "head_ids", "head_logprobs"):
            before, after = getattr(expected, name), getattr(each, name)
            assert (before.dtype, before.shape, before.tobytes()) == (after.dtype, after.shape, after.tobytes())


def broken(change):
    return encode_scores([change(row(3, 4, 2))])


@pytest.mark.parametrize(
    "change",
    [
        lambda each: replace(each, agrees=each.agrees[:3]),
        lambda each: replace(each, head_ids=each.head_ids.reshape(-1)[:7]),
        lambda each: replace(each, head_logprobs=each.head_logprobs[:3]),
        lambda each: replace(each, logprobs=each.logprobs[:0]),
        lambda each: replace(each, logprobs=np.full(4, np.nan, np.float32)),
        lambda each: replace(each, head_logprobs=np.full((4, 2), -np.inf, np.float32)),
    ],
)
def test_lists_that_do_not_fit_are_refused(change):
    with pytest.raises(CorruptObject, match=f"{KEY}.*response 3"):
        decode_scores(KEY, broken(change))


def test_a_damaged_object_is_refused():
    body = encode_scores([row(0, 5, 1)])
    with pytest.raises(CorruptObject, match="digest"):
        decode_scores(KEY, body[:40] + bytes([body[40] ^ 1]) + body[41:])
