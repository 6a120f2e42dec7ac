"""What becomes of another library's settings: fields of ours, what is left out and why, and what is to fill in.

It knows no library. The file that it writes is accepted by `gleaner check` but for the fields that are to fill in.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tasks.configuration.problems import names_at
from tasks.configuration.run_config import ConfigError, RunConfig, parse

# The fields that no default can stand for: what to write, and a value of the right form for the check.
FILL_IN: dict[str, tuple[str, Any]] = {
    "run.url": ("a new directory, or s3://bucket/prefix", "runs/new"),
    "policy.path": ("the directory of your model", "model"),
    "data.source": ("your prompts: a .jsonl or .parquet file, or a saved data set", "prompts.jsonl"),
    "rewards": (
        "your functions, such as [{function: math}] or [{function: my_module:my_function}]",
        [{"function": "math"}],
    ),
}
_SHOWN_CHARACTERS_MAX = 80
_NO_EFFECT = "because nothing reads it"


class NotAdopted(ValueError):  # noqa: N818 - reads as what was found
    """The file holds nothing that can be taken over: one line, with the file."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting where it stands. `text` is its source if that is no literal, and then it has no value."""

    line: int
    name: str
    value: Any = None
    text: str | None = None


@dataclass(frozen=True)
class Carried:
    """A value of ours and the names of the settings that it came from; no names: the library's default."""

    value: Any
    names: tuple[str, ...]


@dataclass(frozen=True)
class Left:
    """What was not carried over, and why; no line: the library's default, or what no file says."""

    line: int | None
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{f'line {self.line}: ' if self.line else ''}{self.name}: {self.reason}"


class Adoption:
    """The settings of one file on their way: `value` reads, `carry` and `leave` decide, `settle` ends it."""

    def __init__(self, settings: Iterable[Setting], library: str) -> None:
        self.library = library
        self.fields: dict[str, Carried] = {}
        self.left: list[Left] = []
        self._given: dict[str, Setting] = {}
        self._open: set[str] = set()
        self._done: set[str] = set()
        for setting in settings:
            if setting.text is not None:
                self._open.add(setting.name)
                self.left.append(Left(setting.line, setting.name, f"{shown(setting.text)} is no literal"))
                continue
            if (earlier := self._given.get(setting.name)) is not None:
                self.left.append(Left(earlier.line, setting.name, f"given again on line {setting.line}"))
            self._given[setting.name] = setting

    def has(self, name: str) -> bool:
        """Whether the file gives a value."""
        return name in self._given

    def is_open(self, *names: str) -> bool:
        """Whether one of these is given as something that is no literal, and so unknown."""
        return not self._open.isdisjoint(names)

    def value(self, name: str, default: Any = None) -> Any:
        """What the file gives, or the library's default."""
        return self._given[name].value if name in self._given else default

    def number(self, name: str, default: float) -> float:
        """As `value`, for a number; leaves out what is none."""
        found = self.value(name, default)
        if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
            return found
        self._refuse(name, "a number")
        return default

    def count(self, name: str, default: int) -> int:
        """As `value`, for an integer; leaves out what is none."""
        found = self.number(name, default)
        if isinstance(found, int):
            return found
        self._refuse(name, "an integer")
        return default

    def word(self, name: str, default: str) -> str:
        """As `value`, for a text; leaves out what is none."""
        found = self.value(name, default)
        if isinstance(found, str):
            return found
        self._refuse(name, "a text")
        return default

    def _refuse(self, name: str, allowed: str) -> None:
        setting = self._given.pop(name)
        if setting.value is not None:
            self.left.append(Left(setting.line, name, f"{shown(repr(setting.value))} given; allowed: {allowed}"))

    def carry(self, field: str, value: Any, *names: str) -> None:
        """Write a field of ours that these settings decide, given or not; nothing if the file hides what is given."""
        given = tuple(name for name in names if name in self._given)
        if not given and self.is_open(*names):
            return
        self.fields[field] = Carried(value, given)
        self._done.update(names)

    def leave(self, name: str, reason: str) -> None:
        """Leave a setting out, if it is given."""
        if name in self._given and name not in self._done:
            self.left.append(Left(self._given[name].line, name, reason))
        self._done.add(name)

    def ignore(self, name: str) -> None:
        """Say nothing about a setting: its value means what Gleaner does anyway."""
        self._done.add(name)

    def note(self, name: str, reason: str) -> None:
        """Name something that the file does not say, and that changes what is learned."""
        self.left.append(Left(None, name, reason))

    def settle(self, same: Mapping[str, str]) -> None:
        """Carry over what is left as it is, by the table of names, and leave out what a configuration cannot hold."""
        for name in self._given:
            if name in self._done:
                continue
            if name not in same:
                self.leave(name, "there is no such setting in Gleaner")
            elif self.value(name) is None:
                self._done.add(name)  # the library's way to say: not set
            else:
                self.carry(same[name], self.value(name), name)
        while (problem := self._problem()) is not None:
            self._drop(problem)
        self.left.sort(key=lambda each: each.line or 0)

    @property
    def missing(self) -> list[str]:
        """The fields that the user must fill in."""
        return [field for field in FILL_IN if field not in self.fields]

    def _problem(self) -> str | None:
        values = {field: carried.value for field, carried in self.fields.items()}
        try:
            parse(_nested({field: value for field, (_, value) in FILL_IN.items()} | values))
        except ConfigError as error:
            return error.problems[0]
        return None

    def _drop(self, problem: str) -> None:
        """Leave out the field that a problem is about, or one that it clashes with: a default may be what it names."""
        path = problem.partition(":")[0]
        section = path.rpartition(".")[0]
        ways = (
            [field for field in self.fields if field == path],
            [field for field in self.fields if path.startswith(f"{field}.") or field.startswith(f"{path}.")],
            [field for field in self.fields if field in problem],
            [field for field in self.fields if field.rpartition(".")[0] == section],
            [*self.fields],
        )
        field = next((found for way in ways for found in way), None)
        if field is None:
            raise NotAdopted(f"what it says cannot be a configuration: {problem}")
        carried = self.fields.pop(field)
        if carried.names:
            self.left.append(Left(self._given[carried.names[0]].line, ", ".join(carried.names), problem))
        elif _NO_EFFECT not in problem:
            self.note(f"{self.library}'s default", problem)


def text_of(adoption: Adoption, source: str) -> str:
    """The configuration as YAML, with the origin of each value, what to fill in, and what was left out."""
    leaves: dict[str, Carried | str] = dict(adoption.fields)
    leaves |= {field: FILL_IN[field][0] for field in adoption.missing}
    lines = [f"# From {shown(source)}, a configuration of {adoption.library}.", *_lines(_nested(leaves), (), adoption)]
    if adoption.left:
        lines += ["", "# Not carried over:", *(f"# - {shown(str(left), None)}" for left in adoption.left)]
    return "\n".join(lines) + "\n"


def shown(text: str, characters_max: int | None = _SHOWN_CHARACTERS_MAX) -> str:
    """A text of a file in one line that a terminal shows as it is."""
    line = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in re.sub(r"\s+", " ", text))
    return line if characters_max is None or len(line) <= characters_max else f"{line[:characters_max]}..."


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return root


def _lines(node: Mapping[str, Any], location: tuple[str, ...], adoption: Adoption) -> Iterator[str]:
    """The lines of a section, in the order of its dataclass."""
    indent = "  " * len(location)
    for name in sorted(node, key=names_at(RunConfig, location).index):
        leaf = node[name]
        if isinstance(leaf, dict):
            yield f"{indent}{name}:"
            yield from _lines(leaf, (*location, name), adoption)
        elif isinstance(leaf, Carried):
            origin = ", ".join(leaf.names) or f"{adoption.library}'s default"
            yield f"{indent}{name}: {_yaml(leaf.value)}  # {origin}"
        else:
            yield f"{indent}{name}:  # fill in: {leaf}"


def _yaml(value: Any) -> str:
    """A JSON value as YAML in one line."""
    plain = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    plain = plain.removesuffix("\n").removesuffix("\n...")
    if "\n" not in plain:
        return str(plain)
    return str(yaml.safe_dump(value, default_flow_style=True, default_style='"', width=float("inf"))).strip()
