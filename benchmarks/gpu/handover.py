"""The hand-over of weights to an engine: one safetensors file written by a member and read by the engine's process."""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.gpu.sizes import Size

_TENSOR_BYTES = 256 << 20
_ROOM = 1.2  # of the file's bytes


def measure(size: Size) -> dict[str, Any]:
    """Bytes per second of writing and of reading to the device, by directory; or why a directory was left out."""
    count = max(1, size.handover_bytes // _TENSOR_BYTES)
    each = size.handover_bytes // count // 2
    tensors = {f"tensor.{index}": torch.full((each,), 1.0, dtype=torch.bfloat16) for index in range(count)}
    folders = {"the temporary directory": Path(tempfile.gettempdir()), "/dev/shm": Path("/dev/shm")}  # noqa: S108
    num_bytes = 2 * each * count
    return {
        "bytes": num_bytes,
        "arms": {name: _through(folder, tensors, num_bytes, size.device) for name, folder in folders.items()},
    }


def _through(folder: Path, tensors: dict[str, torch.Tensor], num_bytes: int, device: str) -> dict[str, Any]:
    if not folder.is_dir():
        return {"skipped": "there is no such directory"}
    free = shutil.disk_usage(folder).free
    if free < _ROOM * num_bytes:
        return {"skipped": f"{free / 1e9:.1f} GB are free, and {_ROOM * num_bytes / 1e9:.1f} are needed"}
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        file = Path(inner) / "weights.safetensors"
        began_s = time.perf_counter()
        save_file(tensors, file)
        written_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        total = 0
        with safe_open(file, framework="pt", device=device) as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                total += opened.get_tensor(name).nbytes
        if device == "cuda":
            torch.cuda.synchronize()
        read_s = time.perf_counter() - began_s
    if total != num_bytes:
        raise RuntimeError(f"{total} of {num_bytes} bytes were read")
    return {"write_bytes_per_s": num_bytes / written_s, "read_bytes_per_s": num_bytes / read_s}
