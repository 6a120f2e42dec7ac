"""The JSON schemas of tools, by which the policy is told of them.

As in TRL and verl, transformers' get_json_schema makes a schema from a function's types and its Google docstring.
The child process that imports a function describes it; only schemas leave the process.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from storage.errors import UserCodeError
from tasks.configuration.turns import TurnsConfig
from tasks.prompts.auto_tokenizer import schema_maker

Schema = dict[str, Any]

# Public methods of an environment that the policy cannot call.
NOT_TOOLS = frozenset({"reset", "get_reward", "get_state", "set_state", "restore", "close"})
_SHOWN_CHARACTERS_MAX = 80
_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


class ToolsUnusable(UserCodeError, ValueError):  # noqa: N818 - reads as what was found
    """Tools or an environment cannot be loaded or used; the message names the setting in one line."""


def describe_tools(functions: Sequence[Callable[..., Any]], environment: Any = None) -> list[Schema]:
    """The schemas of all tools: of the functions in order, then of the public methods of the environment's class.

    Raises ToolsUnusable for tools that cannot be described, for two tools of one name, and for a wrong environment.
    """
    methods: list[Any] = []
    if environment is not None:
        if not isinstance(environment, type):
            kind = type(environment).__name__
            raise ToolsUnusable(f"turns.environment: it is of type {kind}; allowed: a class")
        if not callable(getattr(environment, "reset", None)):
            raise ToolsUnusable(
                f"turns.environment: {environment.__name__} has no method reset; allowed: reset(**columns)"
            )
        methods = _methods(environment)
        if not functions and not methods:
            raise ToolsUnusable(
                f"turns.environment: {environment.__name__} has no public method; allowed: one that is a tool"
            )
    schemas = [schema_of(tool) for tool in (*functions, *methods)]
    names = [name_of(schema) for schema in schemas]
    for name in names:
        if names.count(name) > 1:
            raise ToolsUnusable(f"turns: {name!r} is the name of {names.count(name)} tools; allowed: each its own")
    return schemas


def name_of(schema: Schema) -> str:
    """The name of the tool that a schema describes."""
    return str(schema["function"]["name"])


def check_names(config: TurnsConfig, schemas: Sequence[Schema]) -> None:
    """Raise ToolsUnusable if `tools` names a function by another name than its own, or `side_effects` names no tool."""
    names = [name_of(schema) for schema in schemas]
    for spec in config.tools:
        if spec.rpartition(":")[2].rpartition(".")[2] not in names:
            raise ToolsUnusable(
                f"turns.tools: {spec!r} has another name of its own; allowed: one of {', '.join(names)}"
            )
    for name in config.side_effects:
        if name not in names:
            raise ToolsUnusable(f"turns.side_effects: value {name!r}; allowed: names of tools: {', '.join(names)}")


def schema_of(function: Callable[..., Any]) -> Schema:
    """The schema of a tool: {"type": "function", "function": {"name", "description", "parameters", ...}}.

    Raises ToolsUnusable if it is no function, or lacks types or a docstring, or has parameters that cannot be given by
    name.
    """
    if not inspect.isroutine(function):
        raise ToolsUnusable(f"turns.tools: a tool is of type {type(function).__name__}; allowed: a function")
    name = function.__name__
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ToolsUnusable(f"tool {name!r} has no signature; allowed: a function written in Python") from None
    for parameter in parameters:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise ToolsUnusable(
                f"tool {name!r} has the parameter {str(parameter)!r}; allowed: ones that are given by name"
            )
    try:
        return schema_maker()(function)
    except Exception as error:  # noqa: BLE001 - types are the user's, and resolving them may raise anything
        reason = " ".join(str(error).split())[:300]
        raise ToolsUnusable(
            f"tool {name!r}: no schema can be made from its types and its docstring: {reason}"
        ) from None


def call_problem(schemas: Sequence[Schema], name: str, arguments: object) -> str | None:
    """The reason against a call of the tool with the arguments, in one line; None for a good call."""
    schema = next((schema for schema in schemas if name_of(schema) == name), None)
    if schema is None:
        return f"there is no tool {_shown(name)}; there are: {', '.join(map(name_of, schemas))}"
    if not isinstance(arguments, dict):
        return f"the arguments of {name} are {_shown(arguments)}; allowed: a JSON object"
    parameters = schema["function"]["parameters"]
    properties: Mapping[str, Schema] = parameters["properties"]
    for parameter in parameters.get("required", ()):
        if parameter not in arguments:
            return f"{name} needs the argument {parameter}"
    for parameter, value in arguments.items():
        if parameter not in properties:
            return f"{name} has no argument {_shown(parameter)}; there are: {', '.join(properties) or 'none'}"
        if problem := _misfit(value, properties[parameter], parameter):
            return f"{name}: {problem}"
    return None


def _methods(environment: type) -> list[Any]:
    """The tools of an environment in the order of their names: its public methods, inherited ones too."""
    found = [getattr(environment, name) for name in dir(environment) if name[0] != "_" and name not in NOT_TOOLS]
    return [value for value in found if inspect.isroutine(value)]


def _misfit(value: Any, schema: Schema, where: str) -> str | None:
    """Why a value does not fit a schema of the kinds that get_json_schema makes, named by `where`."""
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema and all(_misfit(value, choice, where) for choice in schema["anyOf"]):
        return f"{where} is {_shown(value)}; allowed: {' or '.join(_kinds(choice) for choice in schema['anyOf'])}"
    kinds = _listed(schema.get("type", ()))
    # Kinds that JSON does not know, such as images, are for the tool to judge.
    if all(kind in _TYPES for kind in kinds) and kinds and not any(_TYPES[kind](value) for kind in kinds):
        return f"{where} is {_shown(value)}; allowed: {_kinds(schema)}"
    places = schema.get("prefixItems", value)
    if isinstance(value, list) and len(value) != len(places):
        return f"{where} has {len(value)} items; allowed: {len(places)}"
    if "enum" in schema and not any(value == choice and type(value) is type(choice) for choice in schema["enum"]):
        return f"{where} is {_shown(value)}; allowed: {', '.join(map(_shown, schema['enum']))}"
    return next(
        (problem for item, inner, place in _items(value, schema, where) if (problem := _misfit(item, inner, place))),
        None,
    )


def _items(value: Any, schema: Schema, where: str) -> Iterator[tuple[Any, Schema, str]]:
    """What lies in an array or an object: each value with its schema and its place."""
    if isinstance(value, list):
        places: list[Schema] = schema.get("prefixItems", [schema.get("items", {})] * len(value))
        for index, (item, inner) in enumerate(zip(value, places, strict=True)):
            yield item, inner, f"{where}[{index}]"
    inner_of_all = schema.get("additionalProperties")
    if isinstance(value, dict) and isinstance(inner_of_all, dict):
        for key, item in value.items():
            yield item, inner_of_all, f"{where}[{_shown(key)}]"


def _listed(kinds: str | Sequence[str]) -> Sequence[str]:
    return (kinds,) if isinstance(kinds, str) else kinds


def _kinds(schema: Schema) -> str:
    return " or ".join([*_listed(schema.get("type", "anything")), *(["null"] if schema.get("nullable") else [])])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]}..."
