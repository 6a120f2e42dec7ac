"""The conversion of a library's settings: fields of Gleaner, omissions with reasons, and fields for the user to fill.

This module knows no library. A given setting without a counterpart leaves a field open, and `gleaner check` refuses the
file until the user fills in the field: a default of Gleaner never replaces an unknown setting.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import yaml

from storage.errors import WrongInputError
from tasks.configuration.problems import UNFILLED, names_at
from tasks.configuration.run_config import ConfigError, RunConfig, parse

# The fields that no default can stand for: what to write, and a value of the right form for the check.
FILL_IN: dict[str, tuple[str, Any]] = {
    "run.url": ("a new directory, or s3://bucket/prefix", "runs/new"),
    "policy.path": ("the directory of your model, or its id on the hub", "model"),
    "data.source": ("your prompts: a .jsonl or .parquet file, a saved data set, or an id on the hub", "prompts.jsonl"),
    "rewards": (
        "your functions, such as [{function: math}] or [{function: my_module:my_function}]",
        [{"function": "math"}],
    ),
}
# In place of fields that may be open, and that others need.
# Without an integer, because a document of floats alone is read in its own way (tasks/configuration/problems.py).
_STAND_INS: dict[str, Any] = {"optimizer.total_steps": 1e9}
# Sections in which a value that is not known changes what is learned.
_LEARNED = ("run.", "data.", "sampling.", "algorithm.", "optimizer.")
_SHOWN_CHARACTERS_MAX = 80
_NO_EFFECT = "because nothing reads it"


class NotAdopted(WrongInputError):  # noqa: N818 - reads as what was found
    """The file has no settings to convert; the message is one line, with the file."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the file or of the command line (line None). `unknown`: the reason for a missing value."""

    line: int | None
    name: str
    value: Any = None
    unknown: str | None = None

    @property
    def place(self) -> str:
        return self.name if self.line is None else f"{self.name} (line {self.line})"


@dataclass(frozen=True)
class Carried:
    """A field's value and the names of the settings behind the value; no names: the library's default."""

    value: Any
    names: tuple[str, ...]


Kind = Literal["not carried over", "converted", "not sure"]


@dataclass(frozen=True)
class Message:
    """A message to the user about a setting; line None: about a default of the library, or a missing setting.

    kind: the setting was not carried over, was carried over with a new value, or may mean something else.
    """

    kind: Kind
    line: int | None
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{f'line {self.line}: ' if self.line else ''}{self.name}: {self.reason}"


class Adoption:
    """The conversion of a file: `value` reads a setting, `carry`, `leave` and `refuse` decide, `settle` ends.

    fields: values by field. open: fields for the user to fill in, with the known facts. messages: to the user.
    fill_in: the fields that no default can stand for.
    defaults: the library's defaults; a setting with its default that is not carried over gets no message.
    """

    def __init__(self, settings: Iterable[Setting], library: str, defaults: Mapping[str, Any]) -> None:
        self.library = library
        self.defaults = defaults
        self.fill_in = dict(FILL_IN)
        self.fields: dict[str, Carried] = {}
        self.open: dict[str, str] = {}
        self.messages: list[Message] = []
        self._given: dict[str, Setting] = {}
        self._unknown: dict[str, Setting] = {}
        self._done: set[str] = set()
        self._hiding: Setting | None = None
        self._hidden: Collection[str] | None = None
        for setting in settings:
            earlier = self._given.pop(setting.name, None) or self._unknown.pop(setting.name, None)
            is_other = earlier is not None and (earlier.value, earlier.unknown) != (setting.value, setting.unknown)
            if earlier is not None and is_other and not setting.name.startswith("*"):
                again = "on the command line" if setting.line is None else f"on line {setting.line}"
                self._tell(earlier.line, setting.name, f"given again {again}")
            if setting.unknown is None:
                self._given[setting.name] = setting
                continue
            self._unknown[setting.name] = setting
            self._tell(setting.line, setting.name, setting.unknown)
            if setting.name.startswith("*"):
                self._hiding = setting

    @property
    def given(self) -> list[str]:
        """The names of the settings with a value."""
        return [*self._given]

    def hide(self, names: Collection[str]) -> None:
        """Limit the settings that a mapping of unknown content can hold to `names`; without a call: all settings."""
        self._hidden = names

    def has(self, name: str) -> bool:
        """True if the file gives a value."""
        return name in self._given

    def is_known(self, *names: str) -> bool:
        """True if no setting in `names` is given without a readable value."""
        return self._unknown.keys().isdisjoint(names)

    def line(self, name: str) -> int | None:
        """The line on which a setting is given."""
        setting = self._given.get(name) or self._unknown.get(name)
        return None if setting is None else setting.line

    def value(self, name: str, default: Any = None) -> Any:
        """The value in the file, or the library's default."""
        return self._given[name].value if name in self._given else default

    def number(self, name: str, default: float) -> float:
        """As `value`, for a number; a different type counts as unknown."""
        found = self.value(name, default)
        if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
            return found
        self._forget(name, "a number")
        return default

    def count(self, name: str, default: int) -> int:
        """As `value`, for an integer; a different type counts as unknown."""
        found = self.number(name, default)
        if isinstance(found, int):
            return found
        self._forget(name, "an integer")
        return default

    def word(self, name: str, default: str) -> str:
        """As `value`, for a text; a different type counts as unknown."""
        found = self.value(name, default)
        if isinstance(found, str):
            return found
        self._forget(name, "a text")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """As `value`, for true or false; a different type counts as unknown."""
        found = self.value(name, default)
        if isinstance(found, bool):
            return found
        self._forget(name, "true or false")
        return default

    def _forget(self, name: str, allowed: str) -> None:
        """Count a given setting as unknown, except null: in the libraries null means not set."""
        setting = self._given.pop(name)
        if setting.value is not None:
            reason = f"{one_line(repr(setting.value))} given; allowed: {allowed}"
            self._unknown[name] = Setting(line=setting.line, name=name, unknown=reason)
            self._tell(setting.line, name, reason)

    def carry(self, field: str, value: Any, *names: str) -> None:
        """Set a field decided by the settings in `names`; the field is left open if a value is unknown."""
        self._done.update(names)
        doubt = self._doubt(names)
        if doubt is not None:
            self.leave_open(field, doubt)
        elif field not in self.open:
            self.fields[field] = Carried(value, tuple(name for name in names if name in self._given))

    def leave_open(self, field: str, known: str) -> None:
        """Leave a field to the user, with the known facts: without a value the file does not parse."""
        self.fields.pop(field, None)
        self.open.setdefault(field, one_line(known, None))

    def refuse(self, name: str, reason: str, *fields: str) -> None:
        """Omit a given setting, and leave the fields decided by the setting open."""
        if name in self._given and name not in self._done:
            for field in fields:
                self.leave_open(field, f"{self._given[name].place}: {reason}")
        self.leave(name, reason)

    def leave(self, name: str, reason: str) -> None:
        """Omit a given setting, with a message."""
        if name in self._given and name not in self._done and not self._is_default(name):
            self._tell(self._given[name].line, name, reason)
        self._done.add(name)

    def leave_section(self, section: str, names: Iterable[str], reason: str) -> None:
        """Omit the settings of a section, with a single message."""
        kept = [name for name in names if name not in self._done]
        self._done.update(kept)
        if kept:
            self._tell(self._given[kept[0]].line, section, reason)

    def ignore(self, *names: str) -> None:
        """Give no message about settings whose known values describe Gleaner's own behaviour."""
        self._done.update(name for name in names if name not in self._unknown)

    def note(self, name: str, reason: str) -> None:
        """Add a message about a setting that is missing in the file, is not carried over, and changes learning."""
        self._tell(None, name, reason)

    def doubt(self, name: str, reason: str, line: int | None = None) -> None:
        """Add a message about an assumption that may be wrong."""
        self._tell(line, name, reason, "not sure")

    def convert(self, name: str, reason: str) -> None:
        """Add a message about a setting that is carried over with a new value."""
        self._done.add(name)
        self._tell(self.line(name), name, reason, "converted")

    def settle(self, same: Mapping[str, str]) -> None:
        """Carry over the remaining settings by the table of names, and leave fields with refused values open."""
        for name, setting in self._unknown.items():
            if name in same and name not in self._done:
                self.leave_open(same[name], f"{setting.place}: {setting.unknown}")
        for name, setting in self._given.items():
            if name in self._done:
                continue
            if name in same and setting.value is not None:
                self.carry(same[name], setting.value, name)
            elif setting.value is not None:
                self.leave(name, "there is no such setting in Gleaner")
        if self._hiding is not None:
            self._leave_hidden_open(same, self._hiding)
        while (problem := self._problem()) is not None:
            self._drop(problem)
        self.messages.sort(key=lambda each: each.line or 0)

    @property
    def missing(self) -> dict[str, str]:
        """The fields that the user must fill in, in the order of a configuration, with the known facts of each."""
        found = {field: what for field, (what, _) in self.fill_in.items() if field not in self.fields} | self.open
        # An item of a list that is missing is missing with it.
        return {field: found[field] for field in sorted(found, key=_place) if not _lies_in(field, found)}

    def _is_default(self, name: str) -> bool:
        """True if a setting has its default value; true differs from 1, and an empty collection equals none."""
        if name not in self.defaults:
            return False
        given, default = self._given[name].value, self.defaults[name]
        if isinstance(given, bool) or isinstance(default, bool):
            return given is default
        return bool(given == default) or (given in ([], {}, "") and default in (None, [], {}, ""))

    def _tell(self, line: int | None, name: str, reason: str, kind: Kind = "not carried over") -> None:
        self.messages.append(Message(kind, line, name, one_line(reason, None)))

    def _doubt(self, names: Iterable[str]) -> str | None:
        """The reason for which a value of the settings is unknown; None: every value is known."""
        named = list(names)
        for setting in (self._unknown[name] for name in named if name in self._unknown):
            return f"{setting.place}: {setting.unknown}"
        hidden = [name for name in named if self._may_hide(name)]
        if self._hiding is not None and hidden:
            return f"{self._hiding.place}: {self._hiding.unknown}, and may hold {', '.join(hidden)}"
        return None

    def _may_hide(self, name: str) -> bool:
        return name not in self._given and (self._hidden is None or name in self._hidden)

    def _leave_hidden_open(self, same: Mapping[str, str], hiding: Setting) -> None:
        for name, field in same.items():
            is_decided = field in self.fields or field in self.fill_in
            if field.startswith(_LEARNED) and self._may_hide(name) and not is_decided:
                self.leave_open(field, f"{hiding.place}: {hiding.unknown}, and may hold {name}")

    def _problem(self) -> str | None:
        """The first problem of the configuration that is not about an open field; None without one."""
        values = {field: carried.value for field, carried in self.fields.items()}
        values |= {field: value for field, value in _STAND_INS.items() if field in self.open}
        try:
            parse(_nested({field: value for field, (_, value) in self.fill_in.items()} | values))
        except ConfigError as error:
            return next((problem for problem in error.problems if not self._is_about_open(problem)), None)
        return None

    def _is_about_open(self, problem: str) -> bool:
        path = problem.partition(":")[0]
        named = set(re.findall(r"\w+(?:\.\w+)*", problem))
        return any(field in named or field.startswith(f"{path}.") for field in self.open)

    def _drop(self, problem: str) -> None:
        """Leave the field of a problem open, or else a field in a clash with it: the problem may name a default."""
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
            self._tell(self._given[carried.names[0]].line, ", ".join(carried.names), problem)
        elif _NO_EFFECT not in problem:
            self.note(f"{self.library}'s default", problem)
        if _NO_EFFECT not in problem:
            origin = ", ".join(carried.names) or f"{self.library}'s default"
            self.leave_open(field, f"{origin}, {_yaml(carried.value)}, does not go: {problem}")


def text_of(adoption: Adoption, source: str) -> str:
    """The configuration as YAML, with the origin of each value, what to fill in, and what was left out."""
    leaves: dict[str, Carried | str] = dict(adoption.fields)
    # An item of a list stands in the list.
    leaves |= {field: what for field, what in adoption.missing.items() if not _has_index(field)}
    lines = [
        f"# From {one_line(source)}, a configuration of {adoption.library}.",
        *_lines(_nested(leaves), (), adoption),
    ]
    for kind in get_args(Kind):
        if messages := [each for each in adoption.messages if each.kind == kind]:
            lines += ["", f"# {kind.capitalize()}:", *(f"# - {each}" for each in messages)]
    return "\n".join(lines) + "\n"


def one_line(text: str, characters_max: int | None = _SHOWN_CHARACTERS_MAX) -> str:
    """A text of a file as one line of printable characters, cut at characters_max."""
    line = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in re.sub(r"\s+", " ", text))
    return line if characters_max is None or len(line) <= characters_max else f"{line[:characters_max]}..."


def _lies_in(field: str, others: Iterable[str]) -> bool:
    return any(field.startswith(f"{other}.") for other in others)


def _place(field: str) -> tuple[int, ...]:
    """The position of a field in a configuration, for sorting."""
    parts = tuple(field.split("."))
    return tuple(
        int(part) if part.isdigit() else names_at(RunConfig, parts[:depth]).index(part)
        for depth, part in enumerate(parts)
    )


def _has_index(field: str) -> bool:
    return any(part.isdigit() for part in field.split("."))


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
            yield f"{indent}{name}: {UNFILLED}  # fill in: {leaf}"


def _yaml(value: Any) -> str:
    """A JSON value as YAML in one line."""
    plain = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    plain = plain.removesuffix("\n").removesuffix("\n...")
    if "\n" not in plain:
        return str(plain)
    return str(yaml.safe_dump(value, default_flow_style=True, default_style='"', width=float("inf"))).strip()
