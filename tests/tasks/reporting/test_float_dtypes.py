"""Conversion of floats without torch, against torch's own."""

import numpy as np
import pytest
import torch

from storage.weights.manifest import TensorBlock
from tasks.reporting.float_dtypes import converted
from tasks.sampling.engines.weight_tensors import DTYPES, as_block, as_torch

TARGETS = ("F32", "F16", "BF16")


def every_pattern(dtype):
    """All values of 16 bits."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)


def near_ties():
    """Float32 values of every sign and exponent, at and beside the places where rounding turns."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return torch.from_numpy((upper | lower).reshape(-1).view(np.float32))


def wide():
    """Float64 values between those of narrower dtypes."""
    values = near_ties()[::7].double()
    return torch.cat([values, values * (1 + 2.0**-30), values * (1 - 2.0**-30), values * 2.0**200])


GIVEN = {
    "F16": lambda: every_pattern(torch.float16),
    "BF16": lambda: every_pattern(torch.bfloat16),
    "F32": near_ties,
    "F64": wide,
}


@pytest.mark.parametrize("dtype", TARGETS)
@pytest.mark.parametrize("stored", GIVEN)
def test_every_value_becomes_torchs_bit_for_bit(stored, dtype):
    values = GIVEN[stored]()
    wanted = values.to(DTYPES[dtype])
    held = values.isfinite() == wanted.isfinite()
    found = as_torch(converted(as_block(values[held]), dtype))
    wanted = wanted[held]
    assert found.dtype == wanted.dtype
    numbers = ~wanted.isnan()
    bits = torch.int16 if dtype != "F32" else torch.int32
    assert torch.equal(found[numbers].view(bits), wanted[numbers].view(bits))
    assert bool(found[~numbers].isnan().all())
    assert len(found) > 30_000
    lost = values[~held]
    assert len(lost) or dtype != "F16" or stored == "F16"
    for value in lost[:: max(1, len(lost) // 50)]:
        assert converted(as_block(value), dtype) is None


def test_a_shape_stays_and_an_empty_tensor_is_one():
    block = converted(as_block(torch.ones(2, 3, 1)), "BF16")
    assert (block.dtype, block.shape, as_torch(block).tolist()) == ("BF16", (2, 3, 1), torch.ones(2, 3, 1).tolist())
    assert converted(TensorBlock("F32", (0, 4), b""), "F16") == TensorBlock("F16", (0, 4), b"")
