"""Attention of new tokens over rows of a key-value cache whose lengths are on the device, without masks.

On a GPU it is torch's variable-length flash attention, which takes a cache in pages; here a page is a row. The plain
function computes the same on any device, with products over whole rows, and is what the kernel is compared with.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)
# The kernel takes pages of a multiple of this many tokens.
PAGE_MULTIPLE = 256
# How far the kernel may be from float32 products of the same half-precision numbers, whose results are up to about 3.
_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class RowReads:
    """The reads of n rows with N new tokens in total.

    Attributes:
        bounds: int32 [n + 1], where the new tokens of each row begin, and N.
        rows: int32 [n, 1], the rows of the cache.
        lengths: int32 [n], the number of tokens in each row, whose last tokens are the new ones.
        longest: the most new tokens of a row.
    """

    bounds: Tensor
    rows: Tensor
    lengths: Tensor
    longest: int


class RowAttention(Protocol):
    """Causal attention of each new token to the tokens of its row up to itself; never waits for the device."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, reads: RowReads) -> Tensor:
        """Queries [N, heads, size], keys and values [rows, capacity, kv_heads, size]; returns [N, heads, size]."""
        ...


def flash(queries: Tensor, keys: Tensor, values: Tensor, reads: RowReads) -> Tensor:
    """`RowAttention` by torch's flash attention: CUDA, bfloat16 or float16, capacity a multiple of PAGE_MULTIPLE."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - registers operators of CUDA

    found = varlen_attn(
        queries,
        keys,
        values,
        reads.bounds,
        # A cache in pages has its lengths in seqused_k; the kernel wants a tensor of this shape besides.
        reads.bounds,
        reads.longest,
        keys.shape[1],
        # One new token sees all of its row. Without a window the kernel reads a key once for all heads that share it.
        window_size=(-1, -1) if reads.longest == 1 else (-1, 0),
        enable_gqa=queries.shape[1] != keys.shape[2],
        seqused_k=reads.lengths,
        block_table=reads.rows,
    )
    assert isinstance(found, Tensor), "no auxiliary result was asked for"
    return found


def plain(queries: Tensor, keys: Tensor, values: Tensor, reads: RowReads) -> Tensor:
    """`RowAttention` by products over whole rows for each token, in float32: any device and dtype, and much memory."""
    tokens = torch.arange(len(queries), device=queries.device)
    piece = torch.bucketize(tokens, reads.bounds[1:], right=True)
    seen = reads.lengths[piece] - (reads.bounds[1:][piece] - tokens) + 1
    rows = reads.rows[piece, 0]
    shared = queries.shape[1] // keys.shape[2]
    q = queries.float().view(len(queries), keys.shape[2], shared, -1)
    k, v = (tensor[rows].float() for tensor in (keys, values))
    scores = torch.einsum("nhgd,nchd->nhgc", q, k) * queries.shape[2] ** -0.5
    beyond = torch.arange(keys.shape[1], device=queries.device) >= seen.unsqueeze(1)
    weights = scores.masked_fill(beyond[:, None, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("nhgc,nchd->nhgd", weights, v).flatten(1, 2).to(queries.dtype)


def checked(
    attention: RowAttention, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> RowAttention | None:
    """Return `attention` if its results on this device equal the results of `plain`; else warn why, and return None.

    The trial runs prefixes and steps of several lengths, with cut rows in any order, and waits for the device.

    Args:
        attention: the function to try.
        heads: the model's query heads, key heads and their size.
        dtype: the dtype of queries and cache.
        device: the device of queries and cache.
    """
    try:
        difference = max(_difference(attention, heads, dtype, device, new) for new in ((1, 1, 1), (70, 1, 37)))
    except Exception as error:  # noqa: BLE001 - a kernel may refuse a device, a size or a page in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    else:
        if difference <= _TOLERANCE:
            return attention
        reason = f"its results are {difference:.3g} from those of plain products"
    _LOG.warning("no flash attention over the cache on %s in %s, which costs time only: %s", device, dtype, reason)
    return None


def _difference(
    attention: RowAttention,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    new: tuple[int, ...],
) -> float:
    """The largest difference for three rows of 300, 500 and 37 tokens, the last `new` of which are new; NaN is inf."""
    query_heads, key_heads, size = heads
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    ends = torch.tensor(new).cumsum(0)
    reads = RowReads(
        bounds=torch.cat((torch.zeros(1), ends)).to(device, torch.int32),
        rows=torch.tensor([[2], [0], [3]], dtype=torch.int32, device=device),
        lengths=torch.tensor([300, 500, 37], dtype=torch.int32, device=device),
        longest=max(new),
    )
    keys, values = (normal(4, 2 * PAGE_MULTIPLE, key_heads, size) for _ in range(2))
    queries = normal(sum(new), query_heads, size)
    found, wanted = (one(queries, keys, values, reads).float() for one in (attention, plain))
    return float((found - wanted).abs().max().nan_to_num(nan=torch.inf))
