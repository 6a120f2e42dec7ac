"""The folder of a reward model: checks before weights are read, and refusals of adapters, code and pickles.

Every error is a GradingError that names the reward and the folder.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.quantizers import AutoHfQuantizer

from resources.regular_files import check_files
from storage.stores.shortage import raise_shortage
from tasks.grading.reward import GradingError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class ModelFolder:
    """The Hugging Face directory of the reward `name`."""

    def __init__(self, name: str, path: Path) -> None:
        """Check the files' names and config.json."""
        self._name = name
        self._path = path
        if not path.is_dir():
            raise self.refused("does not exist")
        try:
            check_files(path)
        except OSError as error:
            raise self.refused(f"cannot be read: {error.strerror}") from None
        if not (path / "config.json").is_file():
            raise self.refused("has no config.json")
        if (path / "adapter_config.json").is_file():
            # If peft is installed, transformers would add the adapter to the model in the folder.
            raise self.refused("has an adapter_config.json: merge the adapter into its model, and remove that file")
        if not any((path / file).is_file() for file in TOKENIZER_FILES):
            # Without any of these files, transformers makes a tokenizer with an empty vocabulary.
            raise self.refused(f"has no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
        self._check_configuration()

    def read(self, what: str, kind: Any, **options: Any) -> Any:
        """Load the folder by a class of transformers, without the network and without running the folder's code."""
        try:
            return kind.from_pretrained(str(self._path), local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:  # with damaged files, libraries may raise anything
            raise self.refused(f"holds no usable {what}: {one_line(error)}") from error

    def refused(self, reason: str) -> GradingError:
        return GradingError(
            f"reward {self._name!r}: model: value {str(self._path)!r} {reason}; "
            "allowed: a Hugging Face directory with a sequence classification model"
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, from the safetensors headers; refuses a file whose size contradicts its header."""
        index = self._path / _INDEX
        files = sorted(self._path.glob("*.safetensors"))
        if (self._path / _WEIGHTS).is_file():
            files = [self._path / _WEIGHTS]
        elif index.is_file():
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, AttributeError, TypeError):
                raise self.refused(f"has an unreadable {_INDEX}") from None
            absent = sorted(map(str, names - {file.name for file in files}))
            if absent:
                raise self.refused(f"lacks the file {absent[0]} of its {_INDEX}")
            files = [file for file in files if file.name in names]
        if not files:
            raise self.refused("holds no .safetensors file, and pickles are never read")
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                with safe_open(str(file), framework="numpy") as opened:
                    shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            except (SafetensorError, OSError, ValueError) as error:
                raise_shortage(error)
                raise self.refused(
                    f"holds {file.name}, which is not a whole safetensors file: {one_line(error)}"
                ) from None
        return shapes

    def check_quantization(self, config: Any) -> bool:
        """Whether the weights are quantized; GradingError if the library of the quantization is not installed.

        config: the transformers configuration. A missing GPU on this machine is no reason to refuse.
        """
        quantization = getattr(config, "quantization_config", None)
        if quantization is None:
            return False
        try:
            AutoHfQuantizer.from_config(copy.deepcopy(quantization), pre_quantized=True).validate_environment(
                device_map=None, weights_only=True
            )
        except ImportError as error:
            raise self.refused(f"has quantized weights that cannot be read here: {one_line(error)}") from None
        except Exception:  # noqa: BLE001, S110 - any other problem is reported where the weights are loaded
            pass
        return True

    def _check_configuration(self) -> None:
        try:
            document = json.loads((self._path / "config.json").read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise self.refused(f"has an unreadable config.json: {one_line(error)}") from None
        if isinstance(document, Mapping) and document.get("transformers_weights") is not None:
            raise self.refused(f"has transformers_weights in its config.json: {document['transformers_weights']!r}")
        for key, value in _implementations(document):
            if "/" in json.dumps(value):
                raise self.refused(f"wants code from elsewhere in config.json: {key} is {json.dumps(value)}")


def _implementations(document: Any) -> list[tuple[str, Any]]:
    """The fields, at any depth, that choose the code for a part of the model."""
    inner = document.values() if isinstance(document, Mapping) else document if isinstance(document, list) else ()
    found = [pair for value in inner for pair in _implementations(value)]
    if isinstance(document, Mapping):
        found += [(key, value) for key, value in document.items() if "_implementation" in key]
    return found


def one_line(error: Exception) -> str:
    """An error's type and the beginning of its message, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
