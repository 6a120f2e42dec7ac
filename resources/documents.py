"""Files that people write, as YAML or JSON: read with limits, so that no file takes the machine's memory or minutes.

Knows nothing about what a document means.
"""

import json
from pathlib import Path
from typing import Any

import yaml

# A hundred times what the longest of our documents has.
BYTES_MAX = 1 << 20
NODES_MAX = 20_000
DEPTH_MAX = 50


class BoundedLoader(yaml.SafeLoader):
    """A YAML loader that counts while it reads, and what an alias stands for at every place where it stands."""

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


def read_text(path: Path) -> str:
    """The text of a file in UTF-8; raises OSError, and ValueError for more than BYTES_MAX bytes or another encoding."""
    with path.open("rb") as file:
        body = file.read(BYTES_MAX + 1)
    if len(body) > BYTES_MAX:
        raise ValueError(f"more than {BYTES_MAX} bytes long")
    return body.decode("utf-8")


def parse_yaml(text: str, loader: type[BoundedLoader] = BoundedLoader) -> object:
    """The document in YAML or JSON; raises ValueError, whose message is one line."""
    try:
        found: object = yaml.load(text, Loader=loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    return found


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
