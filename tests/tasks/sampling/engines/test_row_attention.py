import logging

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own custom
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.sampling.engines.row_attention import PAGE_MULTIPLE, RowReads, checked, flash, plain

CPU = torch.device("cpu")
HEADS = (4, 2, 16)


def inputs(new, lengths, rows, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    reads = RowReads(
        bounds=torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32),
        rows=torch.tensor(rows, dtype=torch.int32).unsqueeze(1),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        longest=max(new),
    )
    keys, values = (torch.randn(5, PAGE_MULTIPLE, 2, 16, generator=generator).to(dtype) for _ in range(2))
    return torch.randn(sum(new), 4, 16, generator=generator).to(dtype), keys, values, reads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("new", "lengths", "rows"), [((1, 1, 1), (9, 1, 256), (3, 0, 1)), ((5, 1, 30, 2), (5, 7, 40, 256), (4, 2, 0, 1))]
)
def test_plain_is_causal_attention_within_each_row(new, lengths, rows, dtype):
    queries, keys, values, reads = inputs(new, lengths, rows, dtype)
    found = plain(queries, keys, values, reads)
    start = 0
    for count, length, row in zip(new, lengths, rows, strict=True):
        q = queries[start : start + count].float().transpose(0, 1)
        k, v = (tensor[row, :length].float().transpose(0, 1) for tensor in (keys, values))
        mask = torch.ones(length, length, dtype=torch.bool).tril()[length - count :]
        wanted = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
        torch.testing.assert_close(
            found[start : start + count].float(),
            wanted.transpose(0, 1),
            atol=1e-5 if dtype is torch.float32 else 0.02,
            rtol=0,
        )
        start += count


def late(queries, keys, values, reads):
    """Also attends to the token after the last one."""
    return plain(queries, keys, values, RowReads(reads.bounds, reads.rows, reads.lengths + 1, reads.longest))


def first_rows(queries, keys, values, reads):
    rows = torch.arange(len(reads.rows), dtype=torch.int32).unsqueeze(1)
    return plain(queries, keys, values, RowReads(reads.bounds, rows, reads.lengths, reads.longest))


def heads_in_another_order(queries, keys, values, reads):
    return plain(queries.flip(1), keys, values, reads).flip(1)


def no_number(queries, keys, values, reads):
    return plain(queries, keys, values, reads) * torch.nan


def only_steps(queries, keys, values, reads):
    assert reads.longest == 1, "no prefixes"
    return plain(queries, keys, values, reads)


@pytest.mark.parametrize("wrong", [late, first_rows, heads_in_another_order, no_number, only_steps, flash])
def test_an_attention_that_computes_something_else_or_fails_is_not_used_and_one_line_says_so(wrong, caplog):
    """Flash attention has no kernel for a CPU."""
    with caplog.at_level(logging.WARNING):
        assert checked(wrong, HEADS, torch.bfloat16, CPU) is None
    assert len(caplog.messages) == 1
    assert "no flash attention over the cache on cpu in torch.bfloat16, which costs time only" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_attention_that_computes_the_same_is_used(dtype, caplog):
    assert checked(plain, HEADS, dtype, CPU) is plain
    assert not caplog.messages


@pytest.mark.parametrize(("new", "window"), [((1, 1), (-1, -1)), ((3, 1), (-1, 0))])
def test_flash_gives_the_kernel_the_cache_as_one_page_a_row(new, window):
    """On the device meta torch computes shapes alone, with the operator's own signature."""
    given = [
        tensor.to("meta") if isinstance(tensor, torch.Tensor) else tensor
        for tensor in inputs(new, (9, 200), (3, 0), torch.bfloat16)
    ]
    reads = given.pop()
    reads = RowReads(*(one.to("meta") for one in (reads.bounds, reads.rows, reads.lengths)), reads.longest)
    calls = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            names = [argument.name for argument in operator._schema.arguments]
            calls.append((operator, dict(zip(names, args, strict=False)) | (kwargs or {})))
            return operator(*args, **(kwargs or {}))

    with torch.inference_mode(), Seen():
        found = flash(*given, reads)
    assert (found.shape, found.dtype) == (given[0].shape, torch.bfloat16)
    seen = next(names for operator, names in calls if operator is torch.ops.torch_attn._varlen_attn.default)
    assert seen["window_size"] == list(window)
    assert seen["is_causal"] == (window == (-1, 0))
    assert seen["max_k"] == PAGE_MULTIPLE == seen["key"].shape[1]
    assert seen["block_table"].shape == (2, 1)
    assert seen["block_table"].dtype == seen["seqused_k"].dtype == seen["cu_seq_q"].dtype == torch.int32
    assert seen["cu_seq_k"].shape == (3,)
    assert seen["enable_gqa"]
