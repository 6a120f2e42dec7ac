"""Kernels: what the torch engine's steps use beside PyTorch's plain operations, and the code that oneDNN keeps."""

import logging
import os
from dataclasses import dataclass

import torch

from tasks.sampling.engines.row_attention import RowAttention, checked, flash
from tasks.sampling.engines.step_graphs import Record, record_on_gpu

_LOG = logging.getLogger(__name__)
# oneDNN keeps the code of 1024 products by default, which is half a gigabyte. Numbers of rows differ from step to step,
# so a process would grow for hours; a pass over a model needs a few dozen at a time. Compiling takes about 1 ms.
PRODUCTS_KEPT = 128


@dataclass(frozen=True, slots=True)
class Kernels:
    """The default is none, which is right for every device, dtype and model.

    Attributes:
        attention: attention over the cache without masks, for decoders with `packed_heads`; None: masks.
        record: recorder of a step, which is then launched as a whole; only with `attention`. None: every operation is
            launched alone.
    """

    attention: RowAttention | None = None
    record: Record | None = None


def kernels_for(heads: tuple[int, int, int] | None, dtype: torch.dtype, device: torch.device) -> Kernels:
    """The kernels for a decoder with the `packed_heads` given: all kernels in half precision on CUDA, else none.

    In float32 a response must be equal alone, in a batch and resumed, which tests show with masks, and flash attention
    takes no float32. The attention is compared with plain products on the device first.
    """
    if device.type != "cuda" or dtype == torch.float32:
        return Kernels()
    if heads is None:
        _LOG.warning("the cache is read with masks, which costs time only: this model's own code asks for them")
        return Kernels()
    attention = checked(flash, heads, dtype, device)
    return Kernels() if attention is None else Kernels(attention, record_on_gpu)


def bound_compiled_products() -> None:
    """Bound the number of compiled matrix products that oneDNN keeps in the process, unless the environment sets it.

    A call counts only before the first use of oneDNN, which reads the bound then. Engines and training call it.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRODUCTS_KEPT))
