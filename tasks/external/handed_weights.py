"""Handed weights: what an external trainer publishes, as the tensors of a weight version, or one clear line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import WrongInputError
from storage.weights.manifest import Manifest, TensorBlock, TensorEntry
from tasks.learning.pretrained import ModelError, read_tensors

# By the name of a dtype in a safetensors header.
_ARRAYS = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "U8": "uint8"}
_REASON_CHARACTERS = 120


class WeightsMisfit(WrongInputError):  # noqa: N818 - reads as what happened
    """The handed weights are not those of the run's model: a name, a shape or a dtype differs."""


def handed_blocks(handed: Mapping[str, Any] | str | Path, first: Manifest) -> dict[str, TensorBlock]:
    """The tensors with the names, shapes and dtypes of the run's first weights, in memory of their own.

    Args:
        handed: A folder in transformers' format, or tensors by name: torch tensors or arrays. Floating-point torch
            tensors are converted to the stored dtype. A tensor beside the names of the first weights is left out if it
            equals a tensor of them, as a tied head does.
        first: The manifest of version 0.

    Raises:
        WeightsMisfit: Names the first tensor that is missing, unknown, unreadable, not finite, or of another shape or
            dtype.
        ModelError: The folder holds no model.
    """
    tensors = _by_name(handed)
    missing = next((name for name in first.tensors if name not in tensors), None)
    if missing is not None:
        raise WeightsMisfit(f"tensors: {missing!r} is missing; allowed: all {len(first.tensors)} tensors of version 0")
    blocks = {name: _block(name, tensors[name], entry) for name, entry in first.tensors.items()}
    for name in tensors.keys() - blocks.keys():
        if not any(_is_same(tensors[name], tensors[known]) for known in blocks):
            raise WeightsMisfit(f"tensors: {name!r} is no tensor of version 0, and equals none; allowed: names of it")
    return blocks


def folder_tensors(folder: Path) -> dict[str, Any]:
    """The torch tensors of a folder whose dtypes may differ from those of the first weights; raises ModelError."""
    from tasks.sampling.engines.weight_tensors import as_torch  # noqa: PLC0415 - where another trainer's folder is read

    return {name: as_torch(block) for name, block in read_tensors(folder).items()}


def _by_name(handed: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(handed, str | Path):
        try:
            return read_tensors(Path(handed))
        except ModelError as error:
            raise ModelError(str(error).replace("policy.path", "tensors")) from None
    if not isinstance(handed, Mapping):
        raise WeightsMisfit(
            f"tensors: a {type(handed).__name__}; allowed: a folder, or tensors by name, such as model.state_dict()"
        )
    return handed


def _block(name: str, value: Any, entry: TensorEntry) -> TensorBlock:
    if not isinstance(value, TensorBlock | np.ndarray) and not hasattr(value, "detach"):
        raise WeightsMisfit(f"tensors: {name!r} is a {type(value).__name__}; allowed: a torch tensor or an array")
    shape = tuple(value.shape)
    if shape != entry.shape:
        raise WeightsMisfit(f"tensors: {name!r} has shape {list(shape)}; allowed: {list(entry.shape)}")
    if isinstance(value, TensorBlock):
        found = value
    elif isinstance(value, np.ndarray):
        found = _of_array(name, value, entry)
    else:
        found = _of_torch(name, value, entry)
    if found.dtype != entry.dtype:
        raise WeightsMisfit(f"tensors: {name!r} has dtype {found.dtype}; allowed: {entry.dtype}")
    if not _is_finite(value, found):
        raise WeightsMisfit(f"tensors: {name!r} has a value that is not finite; allowed: finite numbers")
    # The trainer's next step writes into its own memory.
    return TensorBlock(dtype=found.dtype, shape=found.shape, data=bytes(found.data))


def _of_array(name: str, value: np.ndarray[Any, Any], entry: TensorEntry) -> TensorBlock:
    if value.dtype.name != _ARRAYS.get(entry.dtype):
        raise WeightsMisfit(
            f"tensors: {name!r} has dtype {value.dtype.name}; allowed: {_ARRAYS.get(entry.dtype, 'a torch tensor')}, "
            f"because version 0 has {entry.dtype}"
        )
    ours = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
    return TensorBlock(dtype=entry.dtype, shape=value.shape, data=ours.data)


def _of_torch(name: str, value: Any, entry: TensorEntry) -> TensorBlock:
    # Whoever hands a torch tensor has imported torch.
    from tasks.sampling.engines.weight_tensors import DTYPES, as_block  # noqa: PLC0415

    wanted = DTYPES[entry.dtype]
    try:
        return as_block(value.to(wanted) if value.is_floating_point() and wanted.is_floating_point else value)
    except (TypeError, ValueError, RuntimeError) as error:
        # A sharded tensor has a part alone, and a tensor on the device meta nothing.
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS]
        raise WeightsMisfit(
            f"tensors: {name!r} is a {type(value).__name__} of {value.dtype} on {value.device} that cannot be read "
            f"({reason}); allowed: whole, dense tensors, such as full_tensor() of a sharded one"
        ) from error


def _is_finite(value: Any, found: TensorBlock) -> bool:
    """Whether no number of a tensor as it is stored is infinite or NaN."""
    if isinstance(value, np.ndarray):
        return bool(np.isfinite(value).all())
    from tasks.sampling.engines.weight_tensors import as_torch  # noqa: PLC0415 - for torch tensors and folders alone

    tensor = as_torch(found)
    # A finite sum has finite terms, and needs no second tensor. A sum of finite terms may overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or tuple(one.shape) != tuple(other.shape):
        return False
    if isinstance(one, TensorBlock):
        return one.dtype == other.dtype and bytes(one.data) == bytes(other.data)
    return bool((one == other).all())
