"""How long vLLM takes from nothing to its first token, by what takes the time, with empty and with full caches of code.

The caches are those of the whole call. Where another part has filled them, the first start is a warm one, and there is
no second.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.arm import Arm, start_phases
from benchmarks.gpu.engines import engine_work
from benchmarks.gpu.model import write_model
from benchmarks.gpu.sizes import Size

_LIMIT_S = 600.0  # the part's own is shorter


def measure(size: Size) -> Iterator[dict[str, Any]]:
    """Seconds of each phase of our engine's start, of loading weights, and of a first token; yields with each start."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(size.shape, Path(folder), size.device)
        while "warm" not in found:
            kind = "warm" if found or _files(size) else "cold"
            arm = Arm("benchmarks.gpu.engine_arm", engine_work(size, size.shape, "ours", Path(folder)).as_argument())
            try:
                answer = arm.answer(_LIMIT_S)
                phases = start_phases(arm.log)
            finally:
                arm.close()
            found[kind] = {**answer, "phases": phases}
            yield found | {"cached_files": _files(size)}


def _files(size: Size) -> int:
    return sum(path.is_file() for path in Path(size.caches).rglob("*"))
