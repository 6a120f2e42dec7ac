"""How often Python waits for a device within a piece of work, counted by torch's profiler."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

# Calls of CUDA's runtime, copies to the host, and operators that read a value or a size on the host.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH")
_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")


def waits(work: Callable[[], object]) -> dict[str, int]:
    """The number of each kind of wait within a call; kinds that do not occur are left out.

    A read on the host also shows as the wait and the copy that it causes. The profiler's own waits are taken off.
    """
    own, found = _counts(lambda: None), _counts(work)
    return {name: count - own.get(name, 0) for name, count in found.items() if count > own.get(name, 0)}


def _counts(work: Callable[[], object]) -> dict[str, int]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    counts: dict[str, int] = {}
    for event in profiler.key_averages():
        name = next((each for each in (*_WAITS, *_READS) if event.key.startswith(each)), None)
        if name is not None:
            counts[name] = counts.get(name, 0) + event.count
    return counts
