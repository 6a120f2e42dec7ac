"""Reads YAML and JSON files that people write, strictly: ambiguous input is refused with its line.

Limits keep a file from taking the machine's memory or minutes. The meaning of a document is unknown here.
"""

import json
import math
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from resources.regular_files import open_file

# A hundred times what the longest of our documents has.
BYTES_MAX = 1 << 20
NODES_MAX = 20_000
DEPTH_MAX = 50
_MERGE = "tag:yaml.org,2002:merge"
# Half of a character: no file in UTF-8, store or terminal takes it.
SURROGATE = re.compile("[\ud800-\udfff]")
# YAML 1.1 reads 1e-6 as text.
EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+")
# YAML 1.1 reads 1:30 as 90 and 010 as 8; people and YAML 1.2 do not.
_BASE_60_OR_8 = re.compile(r"[-+]?(?:[0-9_]+:.*|0[0-9_]+)")
# These types are in YAML, not in JSON. Without them a date is text, and the others are refused by their tag.
_NOT_JSON = ("timestamp", "binary", "set", "omap", "pairs")


class DocumentError(ValueError):
    """A file that is not a document: unreadable, neither YAML nor JSON, or ambiguous. One line, without the path."""


def read_document(path: Path) -> Any:
    """The JSON values in a YAML or JSON file; raises DocumentError, which names the line."""
    try:
        with open_file(path) as file:
            body = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DocumentError(f"cannot be read: {error}") from None
    if len(body) > BYTES_MAX:
        raise DocumentError(f"more than {BYTES_MAX} bytes long")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise DocumentError(f"line {line}: byte 0x{body[error.start]:02x} is not UTF-8") from None
    if path.suffix == ".json":
        # YAML forbids tabs between values, and JSON allows them nowhere else.
        text = text.replace("\t", " ")
    return parse_yaml(text)


def parse_yaml(text: str) -> Any:
    """The JSON values in a YAML or JSON text; raises DocumentError, which names the line."""
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


def parse_json(text: str | bytes) -> object:
    """The document in JSON, of any size; raises ValueError, also if it is nested more than DEPTH_MAX levels deep."""
    try:
        found: object = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEPTH_MAX} levels deep") from None
    level: list[object] = [found]
    for _ in range(DEPTH_MAX):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [value for each in inner for value in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return found
    raise ValueError(f"nested more than {DEPTH_MAX} levels deep")


def exact_float(text: str) -> float:
    """The number in a text; raises ValueError if it is beyond the range of floats, and would become 0 or infinity."""
    number = float(text)
    mantissa = text.lower().partition("e")[0]
    if math.isinf(number) or (number == 0 and re.search("[1-9]", mantissa)):
        raise ValueError(f"{text} is beyond the range of numbers, 1e-308 to 1e308")
    return number


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses values beyond JSON, repeated keys, and documents that are too large.

    The loader counts while reading; an alias counts as its full value at every place.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - a table of the class, as in the library
        first: [pair for pair in resolvers if not pair[0].endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or not tag.endswith(tuple(f":{name}" for name in _NOT_JSON))
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0
        self._open = 0
        self._below = 0  # the height of the highest node so far in the collection that is being read
        self._measured: dict[int, tuple[int, int]] = {}  # (nodes, height) of each whole node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node; raises ComposerError above NODES_MAX or DEPTH_MAX, or if a node contains itself."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias = self.check_event(yaml.AliasEvent)
        before, beside = self._nodes, self._below
        self._open, self._below = self._open + 1, 0
        self._check(self._open, self._nodes + 1, mark)
        node = super().compose_node(parent, index)
        if is_alias and id(node) not in self._measured:
            raise yaml.composer.ComposerError(None, None, "an anchor that contains itself", mark)
        nodes, height = self._measured[id(node)] if is_alias else (self._nodes - before + 1, self._below + 1)
        self._measured[id(node)] = nodes, height
        self._nodes, self._open, self._below = before + nodes, self._open - 1, max(beside, height)
        self._check(self._open + height, self._nodes, mark)
        return node

    def _check(self, depth: int, nodes: int, mark: yaml.Mark) -> None:
        if depth > DEPTH_MAX:
            raise yaml.composer.ComposerError(None, None, f"nested more than {DEPTH_MAX} levels deep", mark)
        if nodes > NODES_MAX:
            raise yaml.composer.ComposerError(None, None, f"more than {NODES_MAX} values, aliases followed", mark)

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
        if not isinstance(value, str) or not SURROGATE.search(value):
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
    if _BASE_60_OR_8.fullmatch(node.value):
        _refuse(f"{_shown(node)} is read in base 60 or 8 by YAML; put it in quotes, or write it in base 10", node)
    try:
        if node.tag.endswith(":int"):
            return loader.construct_yaml_int(node)
        text = loader.construct_scalar(node).replace("_", "")
        return exact_float(text) if re.fullmatch(r"[-+.0-9eE]+", text) else loader.construct_yaml_float(node)
    except ValueError as error:
        _refuse(f"{_shown(node)} is no number that can be read: {error}", node)


_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))


def _shown(node: yaml.Node) -> str:
    return f"{node.value:.40}" if isinstance(node.value, str) else "a list or a mapping"


def _refuse(problem: str, node: yaml.Node) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())
