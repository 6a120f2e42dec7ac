"""Conversion of stored tensors from one floating dtype to another, bit for bit as torch converts, without torch.

The machine of an export may be the control pool's, whose image has no torch.
"""

import numpy as np
from numpy.typing import NDArray

from storage.weights.manifest import TensorBlock

# Dtypes as safetensors spells them; NumPy has no bfloat16, which is the upper half of a float32.
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_BF16, _HALF_BITS, _QUIET_NAN = "BF16", 16, 0x7FC0


def converted(block: TensorBlock, dtype: str) -> TensorBlock | None:
    """The tensor in another floating dtype, rounded to the nearest value, and to the even one of two.

    Args:
        block: a tensor of dtype F64, F32, F16 or BF16.
        dtype: F32, F16 or BF16.

    Returns:
        The tensor; None if the dtype does not hold a finite value of it.
    """
    if block.num_bytes == 0:
        return TensorBlock(dtype=dtype, shape=block.shape, data=b"")
    with np.errstate(over="ignore", invalid="ignore"):
        # As torch: a float64 is rounded to float32 first.
        values = _float32(block.data, block.dtype)
        stored = _rounded(values) if dtype == _BF16 else values.astype(_NUMPY[dtype])
    given = np.frombuffer(block.data, _NUMPY["F64"]) if block.dtype == "F64" else values
    if np.any(np.isfinite(given) & ~np.isfinite(_float32(stored.data, dtype))):
        return None
    return TensorBlock(dtype=dtype, shape=block.shape, data=stored.view(np.uint8).data)


def _float32(data: memoryview | bytes, dtype: str) -> NDArray[np.float32]:
    """The values of flat bytes as float32 [n]."""
    if dtype == _BF16:
        return (np.frombuffer(data, "<u2").astype("<u4") << _HALF_BITS).view("<f4")
    return np.frombuffer(data, _NUMPY[dtype]).astype("<f4", copy=False)


def _rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of bfloat16 values [n]."""
    bits = values.view("<u4")
    # Half of the last kept bit, less one where that bit is 0: a tie goes to the even value.
    kept = (bits + (0x7FFF + ((bits >> _HALF_BITS) & 1))) >> _HALF_BITS
    return np.where(np.isnan(values), _QUIET_NAN, kept).astype("<u2")
