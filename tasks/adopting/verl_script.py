"""Reads the settings of verl from a shell script or a YAML file, with overrides behind the file; nothing is executed.

A script's settings are words `a.b=value`. A variable with a single value in the script, or a default
`${NAME:-value}`, is filled in. In a YAML file `${a.b}` is filled in with the file's value of `a.b`.
"""

import io
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from resources.documents import DocumentError, parse_yaml
from tasks.adopting.adoption import NotAdopted, Setting, one_line
from tasks.adopting.verl_defaults import DEFAULTS, machinery_of

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_]\w*(?:\.\w+)+)=(.*)", flags=re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", flags=re.DOTALL)
# $NAME, ${NAME} and ${NAME:-default}.
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^${}]*))?\})")
_FILLED_IN_BY_THE_SHELL = re.compile(r"[$`]")
# ${a.b} and ${oc.select:a.b,default}.
_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^{}]*))?\}")
_VALUE_CHARACTERS_MAX = 10_000
_FILES_OF_SETTINGS = (".yaml", ".yml")
# The configurations of verl that the overrides are of.
_BASES = {"ppo_trainer", "_self_", "_generated_ppo_trainer"}
_CONFIGS = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")


def read(text: str, path: Path, words: Sequence[str]) -> list[Setting]:
    """The settings of a file in the file's order, then the settings of the overrides; raises NotAdopted."""
    found = _of_document(text) if path.suffix in _FILES_OF_SETTINGS else _of_script(text, needs_any=not words)
    for word in words:
        match = _OVERRIDE.fullmatch(word)
        if match is None:
            raise NotAdopted(f"{one_line(word)!r} behind it; allowed: overrides, key.name=value")
        found.append(_setting(None, match[2], match[3]))
    return found


def _of_script(text: str, *, needs_any: bool) -> list[Setting]:
    # A backslash at a line's end joins words that have a space between them anyway.
    stream = io.StringIO(re.sub(r"\\\r?\n", " \n", text))
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split, lexer.commenters = True, ""
    found: list[tuple[int, str, str]] = []
    bases: list[Setting] = []
    variables: dict[str, set[str]] = {}
    before = ""
    try:
        while (word := lexer.get_token()) is not None:
            ended = text.count("\n", 0, max(0, stream.tell() - 1)) + 1 - word.count("\n")
            option, _, value = word.partition("=") if before not in _CONFIGS else (before, "", word)
            if word.startswith("#"):
                stream.readline()
                lexer.lineno += 1
            elif option in _CONFIGS and value:
                bases += _base(ended, option, value)
            elif (match := _OVERRIDE.fullmatch(word)) is not None:
                found.append((ended, match[2], match[3]))
            elif (assigned := _ASSIGNMENT.fullmatch(word)) is not None:
                variables.setdefault(assigned[1], set()).add(_filled_in(assigned[2], variables))
            before = word
    except ValueError as error:
        raise NotAdopted(f"it is no shell script: line {lexer.lineno}: {str(error).lower()}") from None
    if not found and needs_any:
        raise NotAdopted("it has no override of verl; allowed: a shell script or a list of words key.name=value")
    return bases + [_setting(line, name, _filled_in(value, variables)) for line, name, value in found]


def _base(line: int, option: str, value: str) -> list[Setting]:
    """An unknown setting for a configuration file besides verl's own; none for a directory of configurations."""
    if option not in _CONFIGS[:2] or value.removesuffix(".yaml") in _BASES:
        return []
    reason = f"{one_line(value)} is a file of its own; give it as FILE, with the overrides behind it"
    return [Setting(line=line, name=f"*{option}", unknown=reason)]


def _filled_in(text: str, variables: Mapping[str, Collection[str]]) -> str:
    """A value with variables filled in: variables with a single value in the script, or else with a default."""

    def value_of(match: re.Match[str]) -> str:
        values = variables.get(match[1] or match[2], ())
        if len(values) == 1:
            return next(iter(values))
        return match[0] if values or match[3] is None else str(match[3])

    if len(text) > _VALUE_CHARACTERS_MAX:
        return text
    # Variables that hold others several times grow without bound.
    filled = _REFERENCE.sub(value_of, text)
    return filled if len(filled) <= _VALUE_CHARACTERS_MAX else text


def _setting(line: int | None, name: str, text: str) -> Setting:
    unknown = f"{one_line(text)} is no literal"
    if _FILLED_IN_BY_THE_SHELL.search(text):
        return Setting(line=line, name=name, unknown=unknown)
    try:
        return Setting(line=line, name=name, value=parse_yaml(text))
    except DocumentError:
        return Setting(line=line, name=name, unknown=unknown)


def _of_document(text: str) -> list[Setting]:
    """The settings of a YAML file for verl by full name; raises NotAdopted."""
    try:
        document = parse_yaml(text)
    except DocumentError as error:
        raise NotAdopted(f"it is no configuration of verl: {error}") from None
    if not isinstance(document, dict) or not set(document) & {name.partition(".")[0] for name in DEFAULTS}:
        raise NotAdopted("it is no configuration of verl; allowed: a mapping with sections such as actor_rollout_ref")
    lines = dict(_lines(yaml.compose(text, Loader=yaml.SafeLoader), ""))
    leaves = {name: value for name, value in _leaves(document, "") if not name.startswith("hydra.")}
    found: list[Setting] = []
    for name, value in leaves.items():
        if name == "defaults":
            found += _bases(value, lines.get(name))
        elif not name.endswith("._target_") and not (
            name in DEFAULTS and value == DEFAULTS[name] and "$" in str(value)
        ):
            found.append(_interpolated(lines.get(name), name, value, leaves))
    return found


def _bases(listed: Any, line: int | None) -> Iterator[Setting]:
    """Settings for configurations besides verl's own in the list `defaults`."""
    for each in listed if isinstance(listed, list) else [listed]:
        name = next(iter(each.values())) if isinstance(each, dict) and each else each
        if str(name) not in _BASES and not isinstance(each, dict):
            yield Setting(line=line, name="*defaults", unknown=f"{one_line(str(name))} is a file of its own")
        elif isinstance(each, dict):
            yield Setting(line=line, name=f"defaults: {'.'.join(map(str, each))}", value=name)


def _interpolated(line: int | None, name: str, value: Any, leaves: Mapping[str, Any]) -> Setting:
    for _ in range(10):
        match = _INTERPOLATION.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            break
        path = match[1] if not match[1].startswith(".") else f"{name.rpartition('.')[0]}{match[1]}"
        if path in leaves:
            value = leaves[path]
        elif path in DEFAULTS:
            value = DEFAULTS[path]
        elif match[2] is not None:
            return _setting(line, name, match[2])
        else:
            break
    if isinstance(value, str) and "${" in value and machinery_of(name) is None:
        return Setting(line=line, name=name, unknown=f"{one_line(value)} is no literal")
    return Setting(line=line, name=name, value=value)


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}".lstrip("."))
    else:
        yield path, node


def _lines(node: Any, path: str) -> Iterator[tuple[str, int]]:
    """The line of each key of a YAML file, from 1."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{path}.{key.value}".lstrip(".") if isinstance(key, yaml.ScalarNode) else path
            yield name, key.start_mark.line + 1
            yield from _lines(value, name)
