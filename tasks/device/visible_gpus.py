"""The GPUs that torch sees in this process, NVIDIA's driver, and the CUDA releases of torch and driver.

This module reads without judging. torch and the driver's library are arguments, because most machines have no GPU.
"""

import ctypes
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# Where Linux shows the release of NVIDIA's kernel module, and the library of the driver.
_MODULE = Path("/proc/driver/nvidia/version")
_LIBRARY = "libcuda.so.1"
# Flyte tells a container its image so.
_IMAGE = "FLYTE_INTERNAL_IMAGE"
_IN_PARTS = 1000  # CUDA writes release 13.2 as 13020


class Cuda(Protocol):
    """The part of `torch.cuda` that this module reads."""

    def is_available(self) -> bool: ...

    def device_count(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class VisibleGpus:
    """The GPUs of this process.

    Attributes:
        count: The number of GPUs that torch can use.
        torch: The release of torch.
        cuda: The release of CUDA that torch is built for, such as "13.0"; None for a build without CUDA.
        driver: The release of NVIDIA's driver; None if it is unknown.
        driver_cuda: The newest CUDA that the driver runs; None without a driver.
        image: The container's image; None outside of Flyte's containers.
    """

    count: int
    torch: str
    cuda: str | None
    driver: str | None
    driver_cuda: str | None
    image: str | None

    @property
    def is_driver_too_old(self) -> bool:
        """Whether the driver's CUDA has a smaller major number than torch's; releases of equal major number run."""
        if self.cuda is None or self.driver_cuda is None:
            return False
        return _major(self.driver_cuda) < _major(self.cuda)

    def __str__(self) -> str:
        return (
            f"driver {self.driver or 'unknown'} for CUDA {self.driver_cuda or 'none'}, torch {self.torch} for CUDA "
            f"{self.cuda or 'none'}, image {self.image or 'none'}"
        )


def visible_gpus() -> VisibleGpus:
    """Look at this process's GPUs; imports torch."""
    import torch  # noqa: PLC0415 - seconds, which a member with another engine need not wait

    return seen_by(torch.cuda, torch.__version__, torch.version.cuda)


def seen_by(
    cuda: Cuda,
    release: str,
    built_for: str | None,
    *,
    module: Path = _MODULE,
    load: Callable[[str], Any] = ctypes.CDLL,
) -> VisibleGpus:
    """Look at the GPUs through the given parts of torch.

    Args:
        cuda: torch.cuda.
        release: Of torch.
        built_for: The CUDA that torch is built for; None for a build without.
        module: The file in which Linux shows the release of the driver.
        load: Loads a shared library by its name, or raises OSError.
    """
    return VisibleGpus(
        # With a driver that is too old torch counts GPUs that it cannot use.
        count=cuda.device_count() if cuda.is_available() else 0,
        torch=str(release),
        cuda=built_for,
        driver=_driver(module),
        driver_cuda=_driver_cuda(load),
        image=os.environ.get(_IMAGE) or None,
    )


def _driver(module: Path) -> str | None:
    """The release of the kernel module: the first number with two dots, or one, in the first line of its file."""
    try:
        first = module.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", first)
    return found[0] if found else None


def _driver_cuda(load: Callable[[str], Any]) -> str | None:
    """The newest CUDA that the driver runs, by cuDriverGetVersion, which needs neither GPU nor context."""
    try:
        library = load(_LIBRARY)
    except OSError:
        return None
    number = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0 or number.value <= 0:
        return None
    return f"{number.value // _IN_PARTS}.{number.value % _IN_PARTS // 10}"


def _major(release: str) -> int:
    return int(release.partition(".")[0])
