"""What becomes of another library's settings: fields of ours, what is left out and why, and what is to fill in.

It knows no library. What is given and cannot be carried over leaves a field open, and `gleaner check` refuses the file
until the field is filled in: no default of ours stands for a setting that is not known.
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
# Without an integer, because a document of floats alone is read in its own way (tasks/configuration/numbers.py).
_STAND_INS: dict[str, Any] = {"optimizer.total_steps": 1e9}
# Sections in which a value that is not known changes what is learned.
_LEARNED = ("run.", "data.", "sampling.", "algorithm.", "optimizer.")
_SHOWN_CHARACTERS_MAX = 80
_NO_EFFECT = "because nothing reads it"


class NotAdopted(WrongInputError):  # noqa: N818 - reads as what was found
    """The file holds nothing that can be taken over: one line, with the file."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting where it stands; no line: on the command line. `unknown` says why it has no value, if it has none."""

    line: int | None
    name: str
    value: Any = None
    unknown: str | None = None

    @property
    def place(self) -> str:
        return self.name if self.line is None else f"{self.name} (line {self.line})"


@dataclass(frozen=True)
class Carried:
    """A value of ours and the names of the settings that it came from; no names: the library's default."""

    value: Any
    names: tuple[str, ...]


Kind = Literal["not carried over", "converted", "not sure"]


@dataclass(frozen=True)
class Told:
    """What the user is told of a setting; no line: the library's default, or what no file says.

    kind: it was not carried over; it was, with another value than it has there; or the file may mean something else.
    """

    kind: Kind
    line: int | None
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{f'line {self.line}: ' if self.line else ''}{self.name}: {self.reason}"


class Adoption:
    """The settings of one file on their way: `value` reads, `carry`, `leave` and `refuse` decide, `settle` ends it.

    fields: what is carried over. open: the fields that are to fill in, each with what is known of it.
    defaults: the library's. Of a setting that is not carried over and has its default, nothing is said.
    """

    def __init__(self, settings: Iterable[Setting], library: str, defaults: Mapping[str, Any]) -> None:
        self.library = library
        self._defaults = defaults
        self.fields: dict[str, Carried] = {}
        self.open: dict[str, str] = {}
        self.told: list[Told] = []
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
        """The names of the settings that have a value."""
        return [*self._given]

    def hide(self, names: Collection[str]) -> None:
        """Say which settings a mapping of unknown content can hold; all, unless this is said."""
        self._hidden = names

    def has(self, name: str) -> bool:
        """Whether the file gives a value."""
        return name in self._given

    def is_known(self, *names: str) -> bool:
        """Whether each of these is given a value, or is not given by its name."""
        return self._unknown.keys().isdisjoint(names)

    def line(self, name: str) -> int | None:
        """The line on which a setting is given."""
        setting = self._given.get(name) or self._unknown.get(name)
        return None if setting is None else setting.line

    def value(self, name: str, default: Any = None) -> Any:
        """What the file gives, or the library's default."""
        return self._given[name].value if name in self._given else default

    def number(self, name: str, default: float) -> float:
        """As `value`, for a number; what is none counts as not known."""
        found = self.value(name, default)
        if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
            return found
        self._forget(name, "a number")
        return default

    def count(self, name: str, default: int) -> int:
        """As `value`, for an integer; what is none counts as not known."""
        found = self.number(name, default)
        if isinstance(found, int):
            return found
        self._forget(name, "an integer")
        return default

    def word(self, name: str, default: str) -> str:
        """As `value`, for a text; what is none counts as not known."""
        found = self.value(name, default)
        if isinstance(found, str):
            return found
        self._forget(name, "a text")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """As `value`, for true or false; what is neither counts as not known."""
        found = self.value(name, default)
        if isinstance(found, bool):
            return found
        self._forget(name, "true or false")
        return default

    def _forget(self, name: str, allowed: str) -> None:
        """Count what is given as not known; null is the libraries' way to say: not set."""
        setting = self._given.pop(name)
        if setting.value is not None:
            reason = f"{shown(repr(setting.value))} given; allowed: {allowed}"
            self._unknown[name] = Setting(line=setting.line, name=name, unknown=reason)
            self._tell(setting.line, name, reason)

    def carry(self, field: str, value: Any, *names: str) -> None:
        """Write a field of ours that these settings decide, given or not; left open if one of them is not known."""
        self._done.update(names)
        doubt = self._doubt(names)
        if doubt is not None:
            self.leave_open(field, doubt)
        elif field not in self.open:
            self.fields[field] = Carried(value, tuple(name for name in names if name in self._given))

    def leave_open(self, field: str, known: str) -> None:
        """Leave a field to the user, with what is known of it: nothing in its place parses."""
        self.fields.pop(field, None)
        self.open.setdefault(field, shown(known, None))

    def refuse(self, name: str, reason: str, *fields: str) -> None:
        """Leave a setting out, if it is given, and the fields that it decides open."""
        if name in self._given and name not in self._done:
            for field in fields:
                self.leave_open(field, f"{self._given[name].place}: {reason}")
        self.leave(name, reason)

    def leave(self, name: str, reason: str) -> None:
        """Leave a setting out, if it is given."""
        if name in self._given and name not in self._done and not self._is_default(name):
            self._tell(self._given[name].line, name, reason)
        self._done.add(name)

    def leave_section(self, section: str, names: Iterable[str], reason: str) -> None:
        """Leave out settings of one section, in one line."""
        kept = [name for name in names if name not in self._done]
        self._done.update(kept)
        if kept:
            self._tell(self._given[kept[0]].line, section, reason)

    def ignore(self, *names: str) -> None:
        """Say nothing about settings: their values, if they are known, mean what Gleaner does anyway."""
        self._done.update(name for name in names if name not in self._unknown)

    def note(self, name: str, reason: str) -> None:
        """Name something that the file does not give, is not carried over, and changes what is learned."""
        self._tell(None, name, reason)

    def doubt(self, name: str, reason: str, line: int | None = None) -> None:
        """Name something that is taken to be so, and may not be."""
        self._tell(line, name, reason, "not sure")

    def convert(self, name: str, reason: str) -> None:
        """Say that a setting is carried over with another value than it has there."""
        self._done.add(name)
        self._tell(self.line(name), name, reason, "converted")

    def settle(self, same: Mapping[str, str]) -> None:
        """Carry over what is left as it is, by the table of names, and leave out what a configuration cannot hold."""
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
        self.told.sort(key=lambda each: each.line or 0)

    @property
    def missing(self) -> dict[str, str]:
        """The fields that the user must fill in, in the order of a configuration, each with what is known of it."""
        found = {field: what for field, (what, _) in FILL_IN.items() if field not in self.fields} | self.open
        # An item of a list that is missing is missing with it.
        return {field: found[field] for field in sorted(found, key=_place) if not _lies_in(field, found)}

    def _is_default(self, name: str) -> bool:
        """Whether a setting is given its default; true is not 1 here, and an empty collection is none."""
        if name not in self._defaults:
            return False
        given, default = self._given[name].value, self._defaults[name]
        if isinstance(given, bool) or isinstance(default, bool):
            return given is default
        return bool(given == default) or (given in ([], {}, "") and default in (None, [], {}, ""))

    def _tell(self, line: int | None, name: str, reason: str, kind: Kind = "not carried over") -> None:
        self.told.append(Told(kind, line, name, shown(reason, None)))

    def _doubt(self, names: Iterable[str]) -> str | None:
        """Why what these settings say is not known; None if it is."""
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
            is_decided = field in self.fields or field in FILL_IN
            if field.startswith(_LEARNED) and self._may_hide(name) and not is_decided:
                self.leave_open(field, f"{hiding.place}: {hiding.unknown}, and may hold {name}")

    def _problem(self) -> str | None:
        """What no configuration can hold, apart from what is open."""
        values = {field: carried.value for field, carried in self.fields.items()}
        values |= {field: value for field, value in _STAND_INS.items() if field in self.open}
        try:
            parse(_nested({field: value for field, (_, value) in FILL_IN.items()} | values))
        except ConfigError as error:
            return next((problem for problem in error.problems if not self._is_about_open(problem)), None)
        return None

    def _is_about_open(self, problem: str) -> bool:
        path = problem.partition(":")[0]
        named = set(re.findall(r"\w+(?:\.\w+)*", problem))
        return any(field in named or field.startswith(f"{path}.") for field in self.open)

    def _drop(self, problem: str) -> None:
        """Leave the field open that a problem is about, or one that it clashes with: a default may be what it names."""
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
    lines = [f"# From {shown(source)}, a configuration of {adoption.library}.", *_lines(_nested(leaves), (), adoption)]
    for kind in get_args(Kind):
        if told := [each for each in adoption.told if each.kind == kind]:
            lines += ["", f"# {kind.capitalize()}:", *(f"# - {each}" for each in told)]
    return "\n".join(lines) + "\n"


def shown(text: str, characters_max: int | None = _SHOWN_CHARACTERS_MAX) -> str:
    """A text of a file in one line that a terminal shows as it is."""
    line = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in re.sub(r"\s+", " ", text))
    return line if characters_max is None or len(line) <= characters_max else f"{line[:characters_max]}..."


def _lies_in(field: str, others: Iterable[str]) -> bool:
    return any(field.startswith(f"{other}.") for other in others)


def _place(field: str) -> tuple[int, ...]:
    """Where a field stands in a configuration, for sorting."""
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
