"""Reading a pretrained model's tensors from a Hugging Face directory as they are stored, without torch.

Only safetensors are read, because unpickling a file can run any code.
"""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize, safe_open

from resources.documents import parse_json
from storage.weights.tensor_sets import TensorBlock


class ModelError(ValueError):
    """The directory policy.path holds no usable model."""


def check_model(directory: Path) -> None:
    """Raise ModelError unless a directory holds a model that Gleaner can read; reads no tensor."""
    vocabulary_size(directory)
    stop_token_ids(directory)
    for file in weight_files(directory):
        try:
            with safe_open(str(file), framework="numpy"):  # reads the header and compares it with the file's size
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise _not_whole(file, error) from None


def vocabulary_size(directory: Path) -> int:
    """The vocabulary size of a model directory, with or without its weights; raises ModelError."""
    if not directory.is_dir():
        raise ModelError(f"policy.path: {str(directory)!r} does not exist; allowed: a Hugging Face model directory")
    config = directory / "config.json"
    if not config.is_file():
        raise ModelError(f"policy.path: {str(directory)!r} has no config.json")
    try:
        model: Any = parse_json(config.read_bytes())
    except ValueError as error:
        raise ModelError(f"policy.path: {config} is not JSON: {error}") from None
    vocab_size = model.get("vocab_size") or model.get("text_config", {}).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ModelError(f"policy.path: {config} names no vocab_size")
    return vocab_size


def stop_token_ids(directory: Path) -> tuple[int, ...]:
    """The model's end-of-sequence ids, from generation_config.json and config.json; ModelError when it has none."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        if file.is_file():
            try:
                settings: Any = parse_json(file.read_bytes())
            except ValueError as error:
                raise ModelError(f"policy.path: {file} is not JSON: {error}") from None
            ids = settings.get("eos_token_id")
            found.update([ids] if isinstance(ids, int) else ids or [])
    if not found:
        raise ModelError(
            f"policy.path: no eos_token_id in the config.json of {str(directory)!r}; responses would not end"
        )
    return tuple(sorted(found))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, in name order; ModelError when there are none, or one is missing."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            listed: Any = parse_json(index.read_bytes())
            names = sorted(set(listed["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ModelError(f"policy.path: {index} is not an index of safetensors files") from None
        files = [directory / name for name in names if Path(name).name == name]
        absent = [file.name for file in files if not file.is_file()]
        if absent or len(files) != len(names):
            raise ModelError(f"policy.path: {index} names files that are not there: {absent or names}")
        return files
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickles = [file.name for pattern in ("*.bin", "*.pt") for file in sorted(directory.glob(pattern))]
        hint = f"; {pickles[0]} is a pickle, which is never read: convert it to safetensors" if pickles else ""
        raise ModelError(f"policy.path: {str(directory)!r} holds no .safetensors file{hint}")
    return files


def read_tensors(directory: Path) -> dict[str, TensorBlock]:
    """All tensors of a model directory: name -> block in the stored dtype; raises ModelError."""
    tensors: dict[str, TensorBlock] = {}
    for file in weight_files(directory):
        try:
            entries: Any = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
        except (SafetensorError, ValueError) as error:
            raise _not_whole(file, error) from None
        for name, entry in entries:
            if name in tensors:
                raise ModelError(f"policy.path: tensor {name!r} is in two files of {str(directory)!r}")
            tensors[name] = TensorBlock(entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
    return tensors


def _not_whole(file: Path, error: Exception) -> ModelError:
    return ModelError(f"policy.path: {file} is not a whole safetensors file: {error}")
