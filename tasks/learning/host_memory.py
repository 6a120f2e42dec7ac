"""Host memory for tensors that move to a GPU and back; page-locked memory lets copies run in the background."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# torch rounds page-locked memory up to a power of two, which this is, so little is lost.
SLAB_BYTES = 1 << 30
_ALIGNED = 256


def host_zeros(
    wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], *, pinned: bool, slab_bytes: int = SLAB_BYTES
) -> list[Tensor]:
    """Zeros of the `wanted` shapes and dtypes in host memory, cut from slabs; `pinned` (page-locked) needs a GPU."""
    found: list[Tensor] = []
    slab, used = torch.empty(0, dtype=torch.uint8), 0
    for shape, dtype in wanted:
        size = math.prod(shape) * dtype.itemsize
        if used + size > slab.numel():
            slab, used = torch.zeros(max(size, slab_bytes), dtype=torch.uint8, pin_memory=pinned), 0
        found.append(slab[used : used + size].view(dtype).view(shape))
        used += -(-size // _ALIGNED) * _ALIGNED
    return found
