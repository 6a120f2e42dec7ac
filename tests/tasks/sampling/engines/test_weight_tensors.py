import numpy as np
import pytest
import torch

from storage.weights.tensor_sets import TensorBlock
from tasks.sampling.engines.weight_tensors import DTYPES, as_block, as_torch


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2), (5,)])
def test_round_trip_keeps_every_bit(dtype, shape):
    values = torch.arange(12)[: int(np.prod(shape))].reshape(shape).to(dtype)
    block = as_block(values)
    assert len(block.data) == values.numel() * dtype.itemsize
    again = as_torch(TensorBlock(dtype=block.dtype, shape=block.shape, data=bytes(block.data)))
    assert again.dtype == dtype
    assert torch.equal(again, values)


def test_writable_memory_is_shared():
    memory = bytearray(16)
    tensor = as_torch(TensorBlock(dtype="F32", shape=(4,), data=memoryview(memory)))
    memory[:4] = np.float32(2.5).tobytes()
    assert tensor[0] == 2.5


def test_transposed_tensors_are_laid_out_by_their_shape():
    block = as_block(torch.arange(6).reshape(2, 3).t())
    assert as_torch(block).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_unknown_dtypes_are_named():
    with pytest.raises(ValueError, match="dtype: value 'F8_E4M3'"):
        as_torch(TensorBlock(dtype="F8_E4M3", shape=(1,), data=b"\0"))
    with pytest.raises(ValueError, match=r"torch\.complex64"):
        as_block(torch.zeros(1, dtype=torch.complex64))
