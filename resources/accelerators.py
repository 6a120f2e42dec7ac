"""Accelerators: the memory and arithmetic that their data sheets promise, with sources.

No engine reaches these peak figures: code that estimates a speed from them multiplies by an efficiency and says that
the result is an estimate. Arithmetic is dense bfloat16 on tensor cores; data sheets that give it with sparsity show
twice as much. This module knows nothing of prices, models or engines.
"""

import re
from dataclasses import dataclass

_GB = 1e9
_TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """An accelerator and the figures of its data sheet.

    Attributes:
        name: as in the price table.
        also: names that Flyte and users give the accelerator.
        memory_bytes, bandwidth_bytes_per_s: size of the memory, and bytes per second to the memory.
        flops: floating-point operations per second.
        link_bytes_per_s: bytes per second to the machine's further accelerators, in one direction; data sheets state
            the sum of both directions.
    """

    name: str
    also: tuple[str, ...]
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    source: str
    as_of: str


def _sheet(
    name: str,
    also: str,
    memory_gb: float,
    bandwidth_gb_per_s: float,
    tflops: float,
    link_gb_per_s: float,
    source: str,
    as_of: str,
) -> Accelerator:
    return Accelerator(
        name=name,
        also=tuple(also.split()),
        memory_bytes=memory_gb * _GB,
        bandwidth_bytes_per_s=bandwidth_gb_per_s * _GB,
        flops=tflops * _TERA,
        link_bytes_per_s=link_gb_per_s * _GB,
        source=source,
        as_of=as_of,
    )


_H100 = "NVIDIA H100 Tensor Core GPU data sheet, SXM5 column; 1,979 TFLOPS there are with sparsity"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, SXM column; 1,979 TFLOPS there are with sparsity"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet, SXM columns"
_A10G = "NVIDIA A10G product brief (AWS g5); 140 TFLOPS there are with sparsity"
_L40S = "NVIDIA L40S data sheet; 733 TFLOPS there are with sparsity"
_L4 = "NVIDIA L4 data sheet; 242 TFLOPS there are with sparsity"
_CHINA = "no public NVIDIA data sheet was found; figures that resellers and reviews agree on"

# NVLink, or PCIe Gen4 x16 where a GPU has none.
ACCELERATORS: tuple[Accelerator, ...] = (
    _sheet("H100-80GB", "h100 h100-sxm", 80, 3350, 989.4, 450, _H100, "2023-03"),
    _sheet("H200", "h200-141gb h200-sxm", 141, 4800, 989.4, 450, _H200, "2024-11"),
    _sheet("A100-80GB", "a100-80g a100-sxm4-80gb", 80, 2039, 312, 300, _A100, "2021-06"),
    _sheet("A100-40GB", "a100 tesla-a100 a100-sxm4-40gb", 40, 1555, 312, 300, _A100, "2021-06"),
    _sheet("L40S", "l40s-48gb", 48, 864, 362.05, 32, _L40S, "2023-10"),
    _sheet("L4", "l4-24gb l4-vws", 24, 300, 121, 32, _L4, "2023-03"),
    _sheet("A10G", "a10g-24gb", 24, 600, 70, 32, _A10G, "2021-11"),
    _sheet("H20", "h20-96gb", 96, 4000, 148, 450, _CHINA, "2024-01"),
    _sheet("H800", "h800-80gb h800-sxm", 80, 3350, 989.4, 200, _CHINA, "2023-03"),
)


def accelerator(name: str) -> Accelerator:
    """Returns the accelerator of this name or alias; raises LookupError, which lists the known ones."""
    wanted = _plain(name)
    for known in ACCELERATORS:
        if wanted in {_plain(known.name), *map(_plain, known.also)}:
            return known
    names = ", ".join(known.name for known in ACCELERATORS)
    raise LookupError(f"accelerator: value {name!r}; allowed: {names}")


def _plain(name: str) -> str:
    """Drops the maker, lowers the case, and joins words by "-"."""
    return re.sub(r"[ _-]+", "-", name.strip().lower()).removeprefix("nvidia-")
