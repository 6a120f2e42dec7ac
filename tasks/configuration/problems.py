"""What is wrong with a configuration, in one line per problem: the field, the value, and what is allowed.

Flyte carries what its console and flytectl send as a protobuf Struct, whose numbers are all floats: 7 arrives as 7.0.
So a whole float is an integer here, also in mappings whose fields are free; a field of the type float makes it a float
again.
"""

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from resources.documents import EXPONENT, SURROGATE, exact_float
from resources.secret_text import names_secret, secret_in
from tasks.configuration.deleted_fields import advice
from tasks.configuration.other_names import OTHER_NAMES

Value = TypeVar("Value")
INTEGER_BITS_MAX = 63
# What stands in place of a value that only the user knows, as in OmegaConf.
UNFILLED = "???"
_SHOWN_CHARACTERS_MAX = 200
# Below, every integer is a float of its own.
EXACT_BELOW = 1 << 53
_ELSEWHERE = "a run keeps its configuration and shows it; give it to the pods by the field secrets of their pool"
# Where a pod's variables are, Kubernetes has a way of its own.
_OF_A_VARIABLE = "valueFrom with a secretKeyRef, or the pool's secrets"
_OF_A_URL = "a url without it; a store's credentials come from the environment"
# No name, path or url has them on purpose, and two that differ in them alone look alike.
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029]")
# Values of a user's own, which may have lines.
_MAY_HAVE_LINES = re.compile(
    r"(evaluation\.)?rewards\.\d+\.(pattern|arguments\b.*)|(evaluation\.)?data\.chat_template_kwargs\b.*"
    r"|pools\..*\benv\.\d+\.value",
    re.DOTALL,
)


def given_problems(document: object) -> list[str]:
    """What no user's document may hold, wherever it stands: secrets, what JSON cannot hold, and rounded integers.

    Secrets come alone, because another problem could show the value.
    """
    return list(given_secrets(document)) or [*not_json(document), *rounded_integers(document)]


def not_json(document: object, path: str = "") -> Iterator[str]:
    """A problem for each value that JSON in UTF-8 or 64 bits cannot hold, and for control characters in names."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            place = f"{path}.{key}".lstrip(".")
            wrong = _unfit(key) if isinstance(key, str | int) and not isinstance(key, bool) else "allowed: text"
            if wrong is not None:
                yield f"{path or 'the document'}: the key {_shown(key)} given; {wrong}"
            else:
                yield from not_json(value, place)
    elif isinstance(document, list | tuple):
        for index, value in enumerate(document):
            yield from not_json(value, f"{path}.{index}")
    else:
        wrong = _unfit(document)
        if wrong is None and isinstance(document, str) and _CONTROL.search(document):
            wrong = None if _MAY_HAVE_LINES.fullmatch(path) else "allowed: text without control characters"
        if wrong is not None:
            yield f"{path}: {_shown(document)} given; {wrong}"


def _unfit(value: object) -> str | None:
    """What is allowed in place of a single value that JSON in UTF-8 or 64 bits cannot hold; None if they can."""
    if isinstance(value, str):
        is_broken = SURROGATE.search(value) is not None
        return "allowed: text without lone surrogates, which are halves of characters" if is_broken else None
    if isinstance(value, int):
        too_large = value.bit_length() > INTEGER_BITS_MAX
        return f"allowed: integers of up to {INTEGER_BITS_MAX} bits" if too_large else None
    if value is None or isinstance(value, float):
        return None
    return f"allowed: text, a number, true, false, null, a list or a mapping, not a {type(value).__name__}"


def given_secrets(document: object, path: str = "", name: str = "") -> Iterator[str]:
    """The problem of each value below a path that is, or holds, a secret; name: that the value is given for."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield from given_secrets(value, f"{path}.{key}".lstrip("."), _name_of(document, str(key), name))
    elif isinstance(document, list | tuple):
        for index, value in enumerate(document):
            # Items that are mappings have names of their own.
            yield from given_secrets(value, f"{path}.{index}", "" if isinstance(value, Mapping) else name)
    elif isinstance(document, str):
        what = secret_in(document, name)
        if what is not None:
            yield f"{path}: {what} given; allowed: {_allowed(path, what)}"
    elif isinstance(document, int | float) and not isinstance(document, bool) and names_secret(name):
        yield f"{path}: a number whose name says that it is secret given; allowed: {_allowed(path, '')}"


def _name_of(section: Mapping[object, object], key: str, name: str) -> str:
    """What a value of a section is called: a variable by the name beside it, and `api: {key: ...}` as `api_key`."""
    beside = section.get("name")
    if key == "value" and isinstance(beside, str):
        return beside
    return f"{name}_{key}" if name else key


def _allowed(path: str, what: str) -> str:
    if ".env." in path:
        return f"{_OF_A_VARIABLE}, because a run keeps its configuration and shows it"
    is_place = what.startswith("a url") and ".arguments" not in path
    return _OF_A_URL if is_place else f"nothing secret, because {_ELSEWHERE}"


def integers_restored(document: Any) -> Any:
    """The document with integers in place of whole floats."""
    if isinstance(document, Mapping):
        return {name: integers_restored(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [integers_restored(value) for value in document]
    if isinstance(document, float) and document.is_integer() and abs(document) < EXACT_BELOW:
        return int(document)
    return document


def rounded_integers(document: Any) -> Iterator[str]:
    """A problem for each number of a document with floats alone that may be an integer, and then was rounded."""
    numbers = list(_numbers(document))
    if any(isinstance(number, int) for _, number in numbers):
        return
    for path, number in numbers:
        if isinstance(number, float) and number.is_integer() and abs(number) >= EXACT_BELOW:
            yield (
                f"{path}: {number} given; allowed in a document whose numbers are all floats, as Flyte's console and "
                f"flytectl send them: below 2^53 ({EXACT_BELOW}), because larger integers are rounded there"
            )


def _numbers(document: Any, path: str = "") -> Iterator[tuple[str, int | float]]:
    """The path and the value of each number."""
    if isinstance(document, Mapping | list | tuple):
        items = document.items() if isinstance(document, Mapping) else enumerate(document)
        for name, value in items:
            yield from _numbers(value, f"{path}.{name}".lstrip("."))
    elif isinstance(document, int | float) and not isinstance(document, bool):
        yield path, document


def validated(adapter: TypeAdapter[Value], document: str) -> Value:
    """What a JSON document describes; text such as "1e-6", as YAML 1.1 reads it, is a number where a float is wanted.

    Raises ValidationError.
    """
    try:
        return adapter.validate_json(document)
    except ValidationError as error:
        mended, found = json.loads(document), False
        for details in error.errors(include_url=False):
            wanted = float_in(details["input"]) if details["type"] == "float_type" else None
            if wanted is not None:
                *path, last = details["loc"]
                parent = functools.reduce(lambda node, part: node[part], path, mended)
                parent[last] = wanted
                found = True
        if not found:
            raise
        return adapter.validate_json(json.dumps(mended))


def float_in(text: object) -> float | None:
    """The number in text; None if it is none, or beyond the range."""
    try:
        return exact_float(text) if isinstance(text, str) and EXPONENT.fullmatch(text) else None
    except ValueError:
        return None


def unfilled(document: object, path: str = "") -> Iterator[str]:
    """The path of each field that is still to fill in. A reward function's own arguments may hold any text."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            if key != "arguments" or value == UNFILLED:
                yield from unfilled(value, f"{path}.{key}".lstrip("."))
    elif isinstance(document, list | tuple):
        for index, value in enumerate(document):
            yield from unfilled(value, f"{path}.{index}")
    elif document == UNFILLED:
        yield path


def with_unfilled(wrong: list[str], waiting: list[str]) -> list[str]:
    """The problems, with a line for each field to fill in instead of what else is wrong with the field."""
    if not waiting:
        return wrong
    others = (line for line in wrong if UNFILLED not in line and line.partition(":")[0] not in waiting)
    return [*(f"{path}: {UNFILLED} given; fill it in" for path in waiting), *others]


def problems(errors: list[Any], kind: type) -> list[str]:
    """The lines for pydantic's errors about a document of dataclass `kind`; each problem once."""
    places = [error["loc"] for error in errors]
    # An item that is wrong is also missing in the end, and pydantic then says that the list is too short.
    echoes = [
        error["type"] == "too_short" and any(place[: len(error["loc"])] == error["loc"] != place for place in places)
        for error in errors
    ]
    kept = [error for error, is_echo in zip(errors, echoes, strict=True) if not is_echo]
    return [line for error in kept for line in _lines(error, kind)]


def names(kind: Any) -> list[str]:
    """The field names of a dataclass, as a document has them."""
    return [item.name.removesuffix("_") for item in fields(kind)]


def _hints(kind: Any) -> dict[str, Any]:
    """The annotations of a dataclass, by the names of `names`."""
    return {name.removesuffix("_"): hint for name, hint in get_type_hints(kind).items()}


def _lines(error: Any, kind: type) -> list[str]:
    """A line for each problem that an error tells; a check of several fields may tell several."""
    if error["type"] != "value_error":
        return [_problem(error, kind)]
    return [_problem({**error, "msg": message}, kind) for message in error["msg"].split("\n")]


def _problem(error: Any, kind: type) -> str:
    location = error["loc"]
    path = ".".join(str(part) for part in location)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        told = advice(location)
        return f"{path}: deleted field; {told}" if told else f"{path}: unknown field; {_hint(location, kind)}"
    if error["type"] in ("missing", "missing_argument"):
        return f"{path}: missing; it has no default"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error" and not message.startswith("allowed: "):
        return f"{path}.{message}" if path else message
    return f"{path}: {_shown(error['input'])} given; {message[:1].lower()}{message[1:]}"


def _hint(location: tuple[Any, ...], kind: type) -> str:
    """The field that is probably meant: another library's name, a field of another section, or a similar name."""
    given, here = str(location[-1]), [part for part in location[:-1] if isinstance(part, str)]
    allowed = names_at(kind, location[:-1])
    elsewhere = [path for path in _paths(kind) if path.rpartition(".")[2] == given]
    # A run and an evaluation have many fields in common; outside of `evaluation` the run's is meant.
    elsewhere = [path for path in elsewhere if not path.startswith("evaluation.")]
    meant = OTHER_NAMES.get(given) or (elsewhere[0] if len(elsewhere) == 1 else None)
    if meant is None:
        near = difflib.get_close_matches(given, allowed, n=1)
        return f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(allowed)}"
    section, _, name = meant.rpartition(".")
    return f"did you mean {(name if section == '.'.join(here) else meant)!r}?"


def names_at(kind: type, location: tuple[Any, ...]) -> list[str]:
    """The field names of the dataclass at a location of a document of dataclass `kind`; [] if there is none."""
    current: Any = kind
    for part in location:
        # Another name is a user's own, such as a pool's, in a mapping to this dataclass.
        if is_dataclass(current) and part in names(current):
            current = _hints(current)[part]
        current = _dataclass_in(current)
    return names(current) if is_dataclass(current) else []


def _dataclass_in(annotation: Any) -> Any:
    """The first dataclass in an annotation such as `tuple[X, ...] | None`; the annotation itself if it has none."""
    if is_dataclass(annotation):
        return annotation
    return next((found for each in get_args(annotation) if is_dataclass(found := _dataclass_in(each))), annotation)


def _paths(kind: Any, path: str = "") -> Iterator[str]:
    """The path of every field below a dataclass, without items of lists and mappings."""
    for name in names(kind):
        yield f"{path}{name}"
        if is_dataclass(inner := _plain(_hints(kind)[name])):
            yield from _paths(inner, f"{path}{name}.")


def _plain(annotation: Any) -> Any:
    """X for X and `X | None`, else the annotation."""
    options = [each for each in get_args(annotation) if each is not type(None)]
    return options[0] if len(options) == 1 else annotation


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > INTEGER_BITS_MAX:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write out very long ones
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]}..."
