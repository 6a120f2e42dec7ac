"""Reads the command line of a TRL script as TrlParser does, and the YAML file behind the word `--config`."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from resources.documents import DocumentError, parse_yaml
from resources.regular_files import read_file
from tasks.adopting.adoption import NotAdopted, Setting
from tasks.adopting.trl_defaults import ALL
from tasks.configuration.problems import UNFILLED

_WORD = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", flags=re.DOTALL)
_INTEGER = re.compile(r"[-+]?\d{1,18}")
_TRUE, _FALSE = {"true", "yes", "y", "t", "1"}, {"false", "no", "n", "f", "0"}
_LISTS = frozenset({"reward_funcs", "lora_target_modules", "lora_modules_to_save", "lora_target_parameters"})
# The function that TRL's script makes for this name, with these arguments.
_PUNISHMENT = {"max_completion_len": 1280, "soft_punish_cache": 256}


def read_words(words: Sequence[str], document: Sequence[Setting] = ()) -> list[Setting]:
    """The settings in a command line, after those of a YAML file; raises NotAdopted."""
    found: dict[str, Setting] = {each.name: each for each in document}
    rest = list(words)
    while rest:
        match = _WORD.fullmatch(rest.pop(0))
        if match is None:
            raise NotAdopted("the words behind it are no command line of TRL; allowed: --name value")
        name, value = match[1].replace("-", "_"), match[2]
        values = [] if value is None else [value]
        while value is None and rest and _WORD.fullmatch(rest[0]) is None:
            values.append(rest.pop(0))
        if name == "config":
            found |= {each.name: each for each in _of_file(values)} | found
        elif name.startswith("no_") and name not in ALL and ALL.get(name[3:]) is True and not values:
            found[name[3:]] = Setting(line=None, name=name[3:], value=False)
        else:
            found[name] = Setting(line=None, name=name, value=_value(name, values))
    return [_with_functions(each) for each in found.values()]


def read_document(text: str) -> list[Setting]:
    """The settings of a YAML file for TrlParser; raises NotAdopted."""
    try:
        document = parse_yaml(text)
    except DocumentError as error:
        raise NotAdopted(f"it is no configuration for TRL: {error}") from None
    if not isinstance(document, dict) or not document:
        raise NotAdopted("it is no configuration for TRL; allowed: a mapping of names and values")
    return list(_settings(document, text))


def _settings(document: dict[Any, Any], text: str) -> Iterator[Setting]:
    for name, value in document.items():
        match = re.search(rf"^[ \t]*[\"']?{re.escape(str(name))}[\"']?[ \t]*:", text, flags=re.MULTILINE)
        line = None if match is None else text.count("\n", 0, match.start()) + 1
        kept = _number_in(value) if isinstance(value, str) else value
        yield Setting(line=line, name=str(name), value=kept)


def _of_file(values: Sequence[str]) -> list[Setting]:
    if len(values) != 1:
        raise NotAdopted("--config: allowed: one YAML file behind it")
    try:
        text = read_file(Path(values[0])).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise NotAdopted(f"--config: {values[0]} cannot be read: {reason}") from None
    try:
        # The lines of another file than FILE would mislead.
        return [Setting(line=None, name=each.name, value=each.value) for each in read_document(text)]
    except NotAdopted as error:
        raise NotAdopted(f"--config: {values[0]}: {error}") from None


def _value(name: str, values: Sequence[str]) -> Any:
    """The value of a word: true for a flag without a value, a list for several values and for settings of list type."""
    default = ALL.get(name)
    if isinstance(default, bool) or not values:
        word = values[0].lower() if values else "true"
        return True if word in _TRUE else False if word in _FALSE else word
    if default is None and len(values) == 1 and values[0].lower() in ("true", "false"):
        return values[0].lower() == "true"
    read = [_number_in(each) for each in values]
    return read if len(read) > 1 or name in _LISTS else read[0]


def _number_in(text: str) -> Any:
    """A word as number or JSON if possible, else as text."""
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        return float(text) if text.strip() == text and not text.lower().strip("+-").startswith(("n", "i")) else text
    except ValueError:
        pass
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def _with_functions(given: Setting) -> Setting:
    """Reward functions by the names of TRL's script: TRL's own functions, or the dotted path of a user's function."""
    if given.name == "datasets":
        return _mixture(given)
    if given.name != "reward_funcs" or given.value is None:
        return given
    named = given.value if isinstance(given.value, list) else [given.value]
    made: list[Any] = []
    for name in named:
        module, dot, function = str(name).rpartition(".")
        if name == "get_soft_overlong_punishment":
            made.append({"function": f"trl.rewards:{name}", "arguments": _PUNISHMENT})
        elif dot:
            made.append({"function": f"{module}:{function}"})
        else:
            made.append({"function": f"trl.rewards:{name}"} if str(name).isidentifier() else UNFILLED)
    return Setting(line=given.line, name=given.name, value=made)


def _mixture(given: Setting) -> Setting:
    """A mixture of a single data set as `train_dataset`; a mixture of several is unknown."""
    parts = given.value
    if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict):
        known = {"path": "source", "name": "subset", "split": "split"}
        if set(parts[0]) <= set(known) and "path" in parts[0]:
            rows = {known[name]: value for name, value in parts[0].items() if value is not None}
            return Setting(line=given.line, name="train_dataset", value={"split": "train"} | rows)
    if not parts:
        return given
    return Setting(line=given.line, name="train_dataset", unknown="a mixture of data sets: save it with save_to_disk")
