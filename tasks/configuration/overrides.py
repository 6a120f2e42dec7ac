"""Single fields of a configuration, given beside its file: `optimizer.learning_rate=1e-6`.

They become part of the document before it is checked, so hints, clashes and records are those of a file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resources.documents import DocumentError, parse_yaml, read_document
from tasks.configuration.run_config import ConfigError, RunConfig, parse

FORM = "FIELD=VALUE, such as optimizer.learning_rate=1e-6 or rewards.0.weight=2"


def load_with(path: str | Path, overrides: Sequence[str]) -> RunConfig:
    """Read a YAML or JSON file, and change the fields that the overrides name; raises ConfigError."""
    return parse(document_with(path, overrides), str(path))


def document_with(path: str | Path, overrides: Sequence[str]) -> Any:
    """The document of a YAML or JSON file with the overrides' values in it, unchecked; raises ConfigError."""
    try:
        document = read_document(Path(path))
    except DocumentError as error:
        raise ConfigError(str(path), [str(error)]) from None
    try:
        return overridden(document, overrides)
    except ValueError as error:
        raise ConfigError(str(path), [str(error)]) from None


def overridden(document: Any, overrides: Sequence[str]) -> Any:
    """A document with each override's value, a text of YAML or JSON, at its dotted path; a missing section is made.

    Numbers are indices of a list's items. Later overrides win. Raises ValueError, which names the override.
    """
    for override in overrides:
        path, equals, text = override.partition("=")
        names = path.split(".")
        if not equals or not all(names):
            raise ValueError(f"override: value {override!r}; allowed: {FORM}")
        try:
            value = parse_yaml(text)
        except DocumentError as error:
            raise ValueError(f"{path}: value {text!r} is {error}") from None
        document = _with(document, names, value, override)
    return document


def _with(section: Any, names: Sequence[str], value: Any, override: str, place: str = "") -> Any:
    """A section, or a list, with the value at a path below it; nothing is changed in place."""
    if not names:
        return value
    name, rest, inner = names[0], names[1:], f"{place}.{names[0]}".lstrip(".")
    if section is None:
        section = {}
    if isinstance(section, Mapping):
        return {**section, name: _with(section.get(name), rest, value, override, inner)}
    if not isinstance(section, list):
        what = f"{override}: {place or 'the document'} is {section!r}"
        raise ValueError(f"{what}; allowed: a section, or a list")  # noqa: TRY004 - of the user's document
    if not name.isdecimal() or int(name) >= len(section):
        indices = f"an index from 0 to {len(section) - 1}" if section else f"{place}=[...], because the list is empty"
        raise ValueError(f"{override}: {inner} given; allowed: {indices}")
    index = int(name)
    return [*section[:index], _with(section[index], rest, value, override, inner), *section[index + 1 :]]
