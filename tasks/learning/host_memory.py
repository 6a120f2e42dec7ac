"""Memory of the host for tensors that go to a GPU and back: page-locked, so that copies need not wait for the host."""

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
    """Zeros of these shapes and dtypes in host memory, many in one piece; pinned: page-locked, which needs a GPU."""
    found: list[Tensor] = []
    slab, used = torch.empty(0, dtype=torch.uint8), 0
    for shape, dtype in wanted:
        size = math.prod(shape) * dtype.itemsize
        if used + size > slab.numel():
            slab, used = torch.zeros(max(size, slab_bytes), dtype=torch.uint8, pin_memory=pinned), 0
        found.append(slab[used : used + size].view(dtype).view(shape))
        used += -(-size // _ALIGNED) * _ALIGNED
    return found
