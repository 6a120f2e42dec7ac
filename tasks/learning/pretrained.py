"""Reads a pretrained model's tensors from a Hugging Face directory, in the stored dtypes, without torch.

Only safetensors are read, because unpickling a file can run any code.
"""

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize, safe_open

from resources.model_config import CONFIG, ModelConfigError, model_fields, whole_number
from resources.regular_files import check_files
from storage.errors import WrongInputError
from storage.stores.shortage import raise_shortage
from storage.weights.tensor_sets import TensorBlock

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


_PIECE_BYTES = 1 << 22


class ModelError(WrongInputError):
    """The directory policy.path holds no usable model."""


def check_model(directory: Path) -> None:
    """Raise ModelError unless a directory holds a model that Gleaner can read; reads no tensor."""
    vocab_size = vocabulary_size(directory)
    beyond = [token for token in stop_token_ids(directory) if token >= vocab_size]
    if beyond:
        raise ModelError(
            f"policy.path: {str(directory)!r} has eos_token_id {beyond[0]}, which cannot be sampled; allowed: ids "
            f"below vocab_size ({vocab_size})"
        )
    seen: set[str] = set()
    for file in weight_files(directory):
        try:
            # Reads the header and compares it with the file's size.
            with safe_open(str(file), framework="numpy") as opened:
                names = set(opened.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise_shortage(error)
            raise _not_whole(file, error) from None
        if names & seen:
            raise _twice(min(names & seen), directory)
        seen |= names


def vocabulary_size(directory: Path) -> int:
    """The vocabulary size of a model directory, with or without its weights; raises ModelError."""
    try:
        is_directory, is_file = directory.is_dir(), (directory / CONFIG).is_file()
    except OSError as error:
        raise ModelError(f"policy.path: {str(directory)[:80]!r} cannot be read: {error.strerror}") from None
    if not is_directory:
        raise ModelError(f"policy.path: {str(directory)!r} does not exist; allowed: a Hugging Face model directory")
    try:
        check_files(directory)
    except OSError as error:
        raise ModelError(f"policy.path: {str(directory)!r} cannot be read: {error.strerror}") from None
    if not is_file:
        raise ModelError(f"policy.path: {str(directory)!r} has no {CONFIG}")
    given = _fields(directory, CONFIG).get("vocab_size")
    vocab_size = whole_number(given, 1)
    if vocab_size is None:
        raise ModelError(
            f"policy.path: {directory / CONFIG} names no vocab_size from 1 on; it is {json.dumps(given)[:80]}"
        )
    return vocab_size


def stop_token_ids(directory: Path) -> tuple[int, ...]:
    """The ids of eos_token_id in generation_config.json and config.json; ModelError if neither file names any.

    A tokenizer and its chat template may name further stop tokens: see tasks/preparing/stop_tokens.py.
    """
    found: set[int] = set()
    for name in ("generation_config.json", CONFIG):
        if (directory / name).is_file():
            given = _fields(directory, name).get("eos_token_id")
            ids = given if isinstance(given, list) else [] if given is None else [given]
            if any(whole_number(each, 0) is None for each in ids):
                raise ModelError(
                    f"policy.path: {directory / name}: eos_token_id is {json.dumps(given)[:80]}; "
                    "allowed: a token id, or a list of them"
                )
            found.update(ids)
    if not found:
        raise ModelError(
            f"policy.path: no eos_token_id in the config.json of {str(directory)!r}; responses would not end"
        )
    return tuple(sorted(found))


def _fields(directory: Path, name: str) -> dict[str, Any]:
    try:
        return model_fields(directory, name)
    except ModelConfigError as error:
        raise ModelError(f"policy.path: {error}") from None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory as transformers reads them, by name: one file, or an index's files.

    Raises ModelError without model.safetensors and index, or if a file of the index is missing.
    """
    if (directory / _WEIGHTS).is_file():
        return [directory / _WEIGHTS]
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted({str(Path(name)) for name in _fields(directory, _INDEX)["weight_map"].values()})
        except (KeyError, AttributeError, TypeError):
            raise ModelError(f"policy.path: {index} is not an index of safetensors files") from None
        files = [directory / name for name in names if Path(name).name == name]
        absent = [file.name for file in files if not file.is_file()]
        if absent or len(files) != len(names):
            raise ModelError(f"policy.path: {index} names files that are not there: {absent or names}")
        return files
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    if others:
        raise ModelError(
            f"policy.path: {str(directory)!r} holds {others[0]}, but neither {_WEIGHTS} nor {_INDEX}, which alone "
            "transformers reads"
        )
    pickles = [file.name for pattern in ("*.bin", "*.pt") for file in sorted(directory.glob(pattern))]
    hint = f"; {pickles[0]} is a pickle, which is never read: convert it to safetensors" if pickles else ""
    raise ModelError(f"policy.path: {str(directory)!r} holds no .safetensors file{hint}")


def read_tensors(directory: Path) -> dict[str, TensorBlock]:
    """All tensors of a model directory: name -> block in the stored dtype; raises ModelError."""
    tensors: dict[str, TensorBlock] = {}
    for file in weight_files(directory):
        try:
            entries: Any = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
        except (SafetensorError, ValueError) as error:
            raise_shortage(error)
            raise _not_whole(file, error) from None
        for name, entry in entries:
            if name in tensors:
                raise _twice(name, directory)
            tensors[name] = TensorBlock(entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
    return tensors


def count_parameters(directory: Path) -> int:
    """The number of values in a model directory's tensors, from the files' headers; raises ModelError."""
    return sum(map(math.prod, tensor_shapes(directory).values()))


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a model directory's tensors by name, from the files' headers; raises ModelError."""
    return {name: shape for name, (_, shape) in tensor_headers(directory).items()}


def tensor_headers(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtypes, as safetensors calls them, and shapes of a model directory's tensors; raises ModelError."""
    headers: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="np") as tensors:
                for name in list(tensors.keys()):
                    part = tensors.get_slice(name)
                    headers[name] = (str(part.get_dtype()), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise_shortage(error)
            raise _not_whole(file, error) from None
    return headers


def _not_whole(file: Path, error: Exception) -> ModelError:
    return ModelError(f"policy.path: {file} is not a whole safetensors file: {error}")


def _twice(name: str, directory: Path) -> ModelError:
    return ModelError(f"policy.path: tensor {name!r} is in two files of {str(directory)!r}")


def same_values(directory: Path, one: str, other: str) -> bool:
    """Whether two tensors of a model directory have the same dtype, shape and bytes; reads both piece by piece."""
    first, second = (_stored_at(directory, name) for name in (one, other))
    if first[1:3] != second[1:3]:
        return False
    with first[0].open("rb") as ours, second[0].open("rb") as theirs:
        left = first[4] - first[3]
        ours.seek(first[3])
        theirs.seek(second[3])
        while left > 0:
            piece = ours.read(min(left, _PIECE_BYTES))
            if not piece or piece != theirs.read(len(piece)):
                return False
            left -= len(piece)
    return True


def _stored_at(directory: Path, name: str) -> tuple[Path, str, tuple[int, ...], int, int]:
    """A tensor's file, dtype, shape, and byte range in the file: first byte, and the byte after the last."""
    for file in weight_files(directory):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)).get(name)
        if header is not None:
            start, end = (8 + length + offset for offset in header["data_offsets"])
            return file, header["dtype"], tuple(header["shape"]), start, end
    raise ModelError(f"policy.path: {str(directory)!r} has no tensor {name!r}")
