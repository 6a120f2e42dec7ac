"""Conversion of stored tensor blocks to torch tensors and back, without copying where memory allows it.

This module knows the dtype names of safetensors, and nothing of models.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from storage.weights.tensor_sets import TensorBlock

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# What a checkpoint may hold beside these, and no tensor of a run.
_FOREIGN = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
_FOREIGN |= {"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def as_torch(block: TensorBlock) -> Tensor:
    """The block as a CPU tensor; it shares the block's memory if that is writable, so do not write to the tensor.

    Raises:
        ValueError: the dtype is not one of DTYPES.
    """
    dtype = DTYPES.get(block.dtype)
    if dtype is None:
        raise ValueError(f"dtype: value {block.dtype!r}; allowed: {', '.join(DTYPES)}")
    data = memoryview(block.data)
    if not data.nbytes:
        return torch.empty(block.shape, dtype=dtype)
    # torch cannot mark memory as read-only and warns about it, so read-only memory is copied.
    owned = bytearray(data) if data.readonly else data
    return torch.frombuffer(owned, dtype=dtype).view(block.shape)


def tensors_of_folder(folder: Path) -> dict[str, TensorBlock]:
    """All tensors of a model's folder, which was checked when the run copied it, in the stored dtypes."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if not (folder / files[0]).is_file():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({Path(name).name for name in places.values()})
    return {name: as_block(tensor) for file in files for name, tensor in load_file(folder / file).items()}


def on_meta(headers: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Tensors without values, on the device meta, of the dtypes and shapes in the headers of safetensors files.

    Raises:
        ValueError: torch has no such dtype, as with 4-bit floats; names the tensor.
    """
    known, found = DTYPES | _FOREIGN, {}
    for name, (dtype, shape) in headers.items():
        if dtype not in known:
            raise ValueError(f"{name!r}: dtype: value {dtype!r}; allowed: {', '.join(DTYPES)}")
        found[name] = torch.empty(shape, dtype=known[dtype], device="meta")
    return found


def as_block(tensor: Tensor) -> TensorBlock:
    """The tensor's values as a block, which shares memory with a contiguous CPU tensor.

    Raises:
        ValueError: the dtype is not one of DTYPES.
    """
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise ValueError(f"dtype: value {tensor.dtype}; allowed: {', '.join(map(str, _NAMES))}")
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return TensorBlock(dtype=name, shape=tuple(tensor.shape), data=flat.view(torch.uint8).numpy().data)
