"""Drafts on the device: what followed a response's last tokens elsewhere, found by two kernels over rows of tokens.

Rows are those of the responses in flight, which a model runner keeps on the device anyway, and those of a ring of
earlier responses. One program per request and candidate row reads the row once and finds its best place; one program
per request takes the best row's continuation. Nothing waits for the host, and the result depends on tokens alone, so
all workers of a model that is divided among GPUs propose equal drafts.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tasks.sampling.engines.sibling_rows import LONGEST, SHORTEST

_BLOCK = 1024


@dataclass(frozen=True)
class Rows:
    """Rows of tokens on the device; a row's number is its index in `flying`, or len(flying) + its index in `ring`.

    Attributes:
        flying: int32 [S, L], the rows of responses in flight.
        flying_lengths: int32 [S], the number of tokens of each.
        ring: int32 [R, L], the rows of earlier responses.
        ring_lengths: int32 [R], the number of tokens of each.
    """

    flying: Tensor
    flying_lengths: Tensor
    ring: Tensor
    ring_lengths: Tensor


def propose(
    rows: Rows,
    requests: Tensor,
    candidates: Tensor,
    columns: int,
    is_drawn: Tensor,
    last: Tensor,
    scores: Tensor,
    drafts: Tensor,
) -> None:
    """Write drafts for each request: the continuation of its longest suffix in one of its candidate rows.

    A place counts if it has a token, and if the 2 to 8 tokens ahead of it are the request's last. Among equally long
    suffixes other rows win over the request's own, then the place nearest to the request's length, which is right in
    loops and lists, and then the earlier candidate. What a response repeats of itself is continued round and round;
    behind the end of another row, and where no place is found, the drafts are the request's last token.

    Args:
        rows: where tokens are.
        requests: int32 or int64 [B], the request's row, below S.
        candidates: int32 [S, C], C a power of 2: by request's row the numbers of the rows to look in; -1: none. The
            own row must be among them to be looked in.
        columns: how many columns of `candidates` are looked at; the others have nothing but -1.
        is_drawn: int32 [B]; 0: the request's prompt is not computed yet, and it gets no drafts but its last token.
        last: int64 [S], the last token of each row in flight.
        scores: int64 [at least B, C], overwritten.
        drafts: int64 [at least B, k], overwritten in the first B rows.
    """
    count, width = len(requests), candidates.shape[1]
    slots, length = rows.flying.shape
    _score_rows[(count, columns)](
        rows.flying,
        rows.flying_lengths,
        rows.ring,
        rows.ring_lengths,
        requests,
        candidates,
        is_drawn,
        scores,
        slots,
        length,
        width=width,
        shortest=SHORTEST,
        longest=LONGEST,
        block=min(_BLOCK, triton.next_power_of_2(length)),
        num_warps=4,
    )
    _take_best[(count,)](
        rows.flying,
        rows.flying_lengths,
        rows.ring,
        rows.ring_lengths,
        requests,
        candidates,
        last,
        scores,
        drafts,
        slots,
        length,
        columns,
        width=width,
        most=drafts.shape[1],
        most_padded=triton.next_power_of_2(drafts.shape[1]),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["slots", "length"])
def _score_rows(
    flying: tl.tensor,
    flying_lengths: tl.tensor,
    ring: tl.tensor,
    ring_lengths: tl.tensor,
    requests: tl.tensor,
    candidates: tl.tensor,
    is_drawn: tl.tensor,
    scores: tl.tensor,
    slots: int,
    length: int,
    width: tl.constexpr,
    shortest: tl.constexpr,
    longest: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """For one request and candidate: 0, or (suffix's tokens, whether another row, nearness, side) of the best place.

    The four values are digits of one number, which `_take_best` reads. Tensors are pointers to their first element.
    """
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    row = tl.load(requests + request).to(tl.int64)
    other = tl.load(candidates + row * width + column).to(tl.int64)
    drawn = tl.load(is_drawn + request)
    best = tl.zeros([block], dtype=tl.int64)
    if (other >= 0) & (drawn > 0):
        own = flying + row * length
        own_length = tl.load(flying_lengths + row)
        if other < slots:
            first = flying + other * length
            held = tl.load(flying_lengths + other)
        else:
            first = ring + (other - slots) * length
            held = tl.load(ring_lengths + other - slots)
        for start in range(0, held, block):
            place = start + tl.arange(0, block)
            equal = place < held
            suffix = tl.zeros([block], dtype=tl.int32)
            for back in tl.static_range(1, longest + 1):
                # No token is negative, so nothing equals what lies ahead of the request's first one.
                wanted = tl.load(own + own_length - back, mask=own_length >= back, other=-1)
                equal = equal & (place >= back)
                # Masked, so that a place costs no memory once it differs.
                equal = equal & (tl.load(first + place - back, mask=equal, other=-2) == wanted)
                suffix += equal.to(tl.int32)
            behind = place - own_length
            nearness = length - tl.where(behind < 0, -behind, behind)
            kind = suffix * 2 + tl.where(other == row, 0, 1)
            score = (kind.to(tl.int64) * (length + 1) + nearness) * 2 + tl.where(behind < 0, 0, 1)
            best = tl.maximum(best, tl.where(suffix >= shortest, score, 0))
    tl.store(scores + request * width + column, tl.max(best, axis=0))


@triton.jit(do_not_specialize=["slots", "length", "columns"])
def _take_best(
    flying: tl.tensor,
    flying_lengths: tl.tensor,
    ring: tl.tensor,
    ring_lengths: tl.tensor,
    requests: tl.tensor,
    candidates: tl.tensor,
    last: tl.tensor,
    scores: tl.tensor,
    drafts: tl.tensor,
    slots: int,
    length: int,
    columns: int,
    width: tl.constexpr,
    most: tl.constexpr,
    most_padded: tl.constexpr,
) -> None:
    """For one request: the continuation at its best candidate's place, or its last token again."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(requests + request).to(tl.int64)
    column = tl.arange(0, width)
    found = tl.load(scores + request * width + column, mask=column < columns, other=0)
    score = tl.max(found, axis=0)
    other = tl.load(candidates + row * width + tl.argmax(found, axis=0)).to(tl.int64)
    distance = length - (score // 2 % (length + 1)).to(tl.int32)
    place = tl.load(flying_lengths + row) + tl.where(score % 2 == 0, -distance, distance)
    if other < slots:
        first = flying + tl.maximum(other, 0) * length
        held = tl.load(flying_lengths + tl.maximum(other, 0))
    else:
        first = ring + (other - slots) * length
        held = tl.load(ring_lengths + other - slots)
    ahead = tl.arange(0, most_padded)
    period = tl.maximum(held - place, 1)
    offset = tl.where(other == row, ahead % period, ahead)
    inside = (score > 0) & (place + offset < held) & (ahead < most)
    tokens = tl.load(first + place + offset, mask=inside, other=0).to(tl.int64)
    tokens = tl.where(inside, tokens, tl.load(last + row))
    tl.store(drafts + request * most + ahead, tokens, mask=ahead < most)
