"""Reads the overrides of verl, `a.b=value`, from a shell script or a list of words; nothing is executed.

A variable is filled in where the script gives it one value, or `${NAME:-value}` does.
"""

import io
import re
import shlex
from collections.abc import Collection, Mapping

from resources.documents import DocumentError, parse_yaml
from tasks.adopting.adoption import NotAdopted, Setting

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_]\w*(?:\.\w+)+)=(.*)", flags=re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", flags=re.DOTALL)
# $NAME, ${NAME} and ${NAME:-default}.
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^${}]*))?\})")
_FILLED_IN_BY_THE_SHELL = re.compile(r"[$`]")
_VALUE_CHARACTERS_MAX = 10_000


def read_overrides(text: str) -> list[Setting]:
    """The overrides in a script, in its order; raises NotAdopted."""
    # A backslash at a line's end joins words that have a space between them anyway.
    stream = io.StringIO(re.sub(r"\\\r?\n", " \n", text))
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split, lexer.commenters = True, ""
    found: list[tuple[int, str, str]] = []
    variables: dict[str, set[str]] = {}
    try:
        while (word := lexer.get_token()) is not None:
            if word.startswith("#"):
                stream.readline()
                lexer.lineno += 1
            elif (match := _OVERRIDE.fullmatch(word)) is not None:
                ended = text.count("\n", 0, max(0, stream.tell() - 1))
                found.append((ended + 1 - word.count("\n"), match[2], match[3]))
            elif (assigned := _ASSIGNMENT.fullmatch(word)) is not None:
                variables.setdefault(assigned[1], set()).add(_filled_in(assigned[2], variables))
    except ValueError as error:
        raise NotAdopted(f"it is no shell script: line {lexer.lineno}: {str(error).lower()}") from None
    if not found:
        raise NotAdopted("it has no override of verl; allowed: a shell script or a list of words key.name=value")
    return [_setting(line, name, _filled_in(value, variables)) for line, name, value in found]


def _filled_in(text: str, variables: Mapping[str, Collection[str]]) -> str:
    """A value with the variables that the script gives one value, or else the default that stands beside the name."""

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


def _setting(line: int, name: str, text: str) -> Setting:
    if _FILLED_IN_BY_THE_SHELL.search(text):
        return Setting(line=line, name=name, text=text)
    try:
        return Setting(line=line, name=name, value=parse_yaml(text))
    except DocumentError:
        return Setting(line=line, name=name, text=text)
