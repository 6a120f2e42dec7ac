"""Reads the overrides of verl, `a.b=value`, from a shell script or a list of words; nothing is executed."""

import io
import re
import shlex

from resources.documents import DocumentError, parse_yaml
from tasks.adopting.adoption import NotAdopted, Setting

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_]\w*(?:\.\w+)+)=(.*)", flags=re.DOTALL)
_FILLED_IN_BY_THE_SHELL = re.compile(r"[$`]")


def read_overrides(text: str) -> list[Setting]:
    """The overrides in a script, in its order; raises NotAdopted."""
    # A backslash at a line's end joins words that have a space between them anyway.
    stream = io.StringIO(re.sub(r"\\\r?\n", " \n", text))
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split, lexer.commenters = True, ""
    found = []
    try:
        while (word := lexer.get_token()) is not None:
            if word.startswith("#"):
                stream.readline()
                lexer.lineno += 1
            elif (match := _OVERRIDE.fullmatch(word)) is not None:
                ended = text.count("\n", 0, max(0, stream.tell() - 1))
                found.append(_setting(ended + 1 - word.count("\n"), match[2], match[3]))
    except ValueError as error:
        raise NotAdopted(f"it is no shell script: line {lexer.lineno}: {str(error).lower()}") from None
    if not found:
        raise NotAdopted("it has no override of verl; allowed: a shell script or a list of words key.name=value")
    return found


def _setting(line: int, name: str, text: str) -> Setting:
    if _FILLED_IN_BY_THE_SHELL.search(text):
        return Setting(line=line, name=name, text=text)
    try:
        return Setting(line=line, name=name, value=parse_yaml(text))
    except DocumentError:
        return Setting(line=line, name=name, text=text)
