"""Reads YAML and JSON files that people write, strictly: what could be read in two ways is refused with its line.

This module knows nothing of what the documents mean.
"""

import math
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NoReturn

import yaml

_MERGE = "tag:yaml.org,2002:merge"
_SURROGATE = re.compile("[\ud800-\udfff]")
# YAML 1.1 reads 1e-6 as text.
_EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+")
# These types are in YAML, not in JSON. Without them a date is text, and the others are refused by their tag.
_NOT_JSON = ("timestamp", "binary", "set", "omap", "pairs")


class DocumentError(ValueError):
    """A file that is not a document: unreadable, neither YAML nor JSON, or ambiguous. One line, without the path."""


def read_document(path: Path) -> Any:
    """The JSON values in a YAML or JSON file; raises DocumentError, which names the line."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DocumentError(f"cannot be read: {error}") from None
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise DocumentError(f"line {line}: byte 0x{body[error.start]:02x} is not UTF-8") from None
    if path.suffix == ".json":
        # YAML forbids tabs between values, and JSON allows them nowhere else.
        text = text.replace("\t", " ")
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}: "
        what = "" if isinstance(error, yaml.constructor.ConstructorError) else "not YAML or JSON: "
        raise DocumentError(f"{what}{where}{_one_line(error.problem or error.context)}") from None
    except yaml.YAMLError as error:
        raise DocumentError(f"not YAML or JSON: {_one_line(error)}") from None
    except RecursionError:
        raise DocumentError("not YAML or JSON that can be read: it is nested too deeply") from None


def exact_float(text: str) -> float:
    """The number in a text; raises ValueError if it is beyond the range of floats, and would become 0 or infinity."""
    number = float(text)
    mantissa = text.lower().partition("e")[0]
    if math.isinf(number) or (number == 0 and re.search("[1-9]", mantissa)):
        raise ValueError(f"{text} is beyond the range of numbers, 1e-308 to 1e308")
    return number


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses what JSON cannot hold, and a key that is given twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - a table of the class, as in the library
        first: [pair for pair in resolvers if not pair[0].endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or not tag.endswith(tuple(f":{name}" for name in _NOT_JSON))
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: ARG002 - always deep
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in lines:
                _refuse(f"{key!r} is given twice, first in line {lines[key]}", key_node)
            lines[key] = line
        self.flatten_mapping(node)
        return {self._key(key): self.construct_object(value, deep=True) for key, value in node.value}

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if not isinstance(value, str) or not _SURROGATE.search(value):
            return value
        try:
            # JSON writes a character beyond 16 bits as two escapes, which YAML reads as two characters.
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            _refuse("half of a character, a lone surrogate", node)

    def _key(self, node: yaml.Node) -> str:
        key = self.construct_object(node, deep=True) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(key, str | int) or isinstance(key, bool):
            _refuse(f"a key that is not text ({_shown(node)}); allowed: text, in quotes if it has a meaning", node)
        return str(key)


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    try:
        if node.tag.endswith(":int"):
            return loader.construct_yaml_int(node)
        text = loader.construct_scalar(node).replace("_", "")
        return exact_float(text) if re.fullmatch(r"[-+.0-9eE]+", text) else loader.construct_yaml_float(node)
    except ValueError as error:
        _refuse(f"{_shown(node)} is no number that can be read: {error}", node)


_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def _shown(node: yaml.Node) -> str:
    return f"{node.value:.40}" if isinstance(node.value, str) else "a list or a mapping"


def _refuse(problem: str, node: yaml.Node) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())
