"""The memory of a process that works through many iterations."""

import ctypes
import gc
import sys


def give_back() -> None:
    """Return freed memory to the operating system.

    Without this, a process that trains for hours grows: cycles of objects wait for Python's collector, and the C
    library keeps what tensors of ever new sizes have freed in pieces between what is still in use.
    """
    gc.collect()
    if sys.platform == "linux":
        # Only glibc has it; musl returns memory by itself.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
