"""The few things that Gleaner reads from a model's config.json, which any program may have written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resources.documents import parse_json
from resources.regular_files import read_file

CONFIG = "config.json"
# The names that families of models give to the number of their positions; vLLM knows the same ones.
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


class ModelConfigError(ValueError):
    """A model's configuration that cannot be read; one line that names the file."""


def model_fields(directory: Path, name: str = CONFIG) -> dict[str, Any]:
    """The fields of a JSON file of a model directory, with those of its `text_config` in their place.

    Raises ModelConfigError if the file or its text_config is not a JSON object.
    """
    file = directory / name
    try:
        document = parse_json(read_file(file))
    except OSError as error:
        raise ModelConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelConfigError(f"{file} is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ModelConfigError(f"{file} holds a {type(document).__name__}; allowed: a JSON object")
    text = document.get("text_config", {})
    if not isinstance(text, dict):
        raise ModelConfigError(f"{file}: text_config is {json.dumps(text)[:80]}; allowed: a JSON object")
    return document | {field: value for field, value in text.items() if value is not None}


def positions_max(fields: Mapping[str, Any]) -> int | None:
    """The most tokens of a sequence, by whichever name a model's fields give it; None if they do not."""
    given = [whole_number(fields.get(name), 2) for name in _POSITIONS]
    return min((number for number in given if number is not None), default=None)


def whole_number(value: object, least: int) -> int | None:
    """The value if it is an integer from `least` to 31 bits, as token ids are, else None; true and false are none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31 else None
