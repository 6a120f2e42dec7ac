"""Schemas of tools as TRL and verl make them, what is refused, and which arguments fit."""

from typing import Any, Literal

import pytest

from tasks.configuration.turns import TurnsConfig
from tasks.turns.tool_schemas import (
    ToolsUnusable,
    call_problem,
    check_names,
    describe_tools,
    schema_of,
)

REGISTERED = {}


def registering(function):
    """As verl's decorator: it notes the function, and returns it unchanged."""
    REGISTERED[function.__name__] = function
    return function


@registering
def multiply(a: int, b: float | None = None, *, unit: Literal["m", "km"] = "m") -> str:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
        unit: The unit of the result.

    Returns:
        The product.
    """
    return f"{a} {b} {unit}"


async def wait(names: list[str], pair: tuple[int, str], sizes: dict[str, int], anything: Any, either: int | list[int]):
    """Wait.

    Args:
        names: Names.
        pair: A pair.
        sizes: Sizes.
        anything: Anything.
        either: Either.
    """


class Base:
    def step(self, move: str) -> str:
        """Make a move.

        Args:
            move: The move.
        """
        return move


class World(Base):
    """An environment with one tool that it inherits and one of its own."""

    size = 3

    def reset(self, **columns):
        return None

    def look(self) -> str:
        """Look around."""
        return self._hidden()

    def get_reward(self):
        return 1.0

    def get_state(self):
        return {}

    def set_state(self, state):
        pass

    def restore(self, turns):
        pass

    def close(self):
        pass

    def _hidden(self):
        return ""


def names(schemas):
    return [schema["function"]["name"] for schema in schemas]


def test_a_schema_has_types_descriptions_and_choices():
    [schema] = describe_tools([multiply])
    assert schema["type"] == "function"
    assert schema["function"]["description"] == "Multiply two numbers."
    parameters = schema["function"]["parameters"]
    assert parameters["required"] == ["a"]
    assert parameters["properties"]["b"] == {"type": "number", "nullable": True, "description": "The second number."}
    assert parameters["properties"]["unit"]["enum"] == ["m", "km"]


def test_the_tools_of_an_environment_are_its_public_methods_but_those_of_the_contract():
    assert names(describe_tools([], World)) == ["look", "step"]
    assert names(describe_tools([wait, multiply], World)) == ["wait", "multiply", "look", "step"]
    look, step = describe_tools([], World)
    assert look["function"]["parameters"]["properties"] == {}
    assert list(step["function"]["parameters"]["properties"]) == ["move"]


def undocumented(a: int):
    return a


def partly(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
    """
    return a + b


def untyped(a):
    """Add.

    Args:
        a: One.
    """


def open_ended(**rest: int):
    """Add.

    Args:
        rest: All.
    """


def unresolved(a: "Missing"):  # noqa: F821 - a type that cannot be resolved is what is tested
    """Add.

    Args:
        a: One.
    """


class Spoken:
    def __call__(self):
        """Called."""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (undocumented, "no docstring"),
        (partly, "no description for the argument 'b'"),
        (untyped, "Argument a is missing a type hint"),
        (open_ended, r"has the parameter '\*\*rest: int'; allowed: ones that are given by name"),
        (unresolved, "'Missing' is not defined"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused_by_its_name(function, reason):
    with pytest.raises(ToolsUnusable, match=rf"^tool '{function.__name__}'.*{reason}") as raised:
        schema_of(function)
    assert "\n" not in str(raised.value)


def look() -> str:
    """Look."""
    return ""


class Bare:
    def reset(self):
        pass


class Unreset:
    def look(self):
        """Look."""


@pytest.mark.parametrize(
    ("functions", "environment", "reason"),
    [
        ([look], World, r"turns: 'look' is the name of 2 tools; allowed: each its own"),
        ([multiply, multiply], None, r"turns: 'multiply' is the name of 2 tools; allowed: each its own"),
        ([Spoken()], None, r"turns\.tools: a tool is of type Spoken; allowed: a function"),
        ([], Bare, r"turns\.environment: Bare has no public method"),
        ([], Unreset, r"turns\.environment: Unreset has no method reset"),
        ([], multiply, r"turns\.environment: it is of type function; allowed: a class"),
    ],
)
def test_tools_that_do_not_go_together_are_refused(functions, environment, reason):
    with pytest.raises(ToolsUnusable, match=reason):
        describe_tools(functions, environment)


def test_a_tool_goes_by_its_own_name():
    schemas = describe_tools([multiply])
    check_names(TurnsConfig(tools=("m:multiply",)), schemas)
    with pytest.raises(
        ToolsUnusable, match=r"^turns\.tools: 'm:times' has another name of its own; allowed: one of multiply"
    ):
        check_names(TurnsConfig(tools=("m:times",)), schemas)


def test_side_effects_are_of_tools():
    schemas = describe_tools([], World)
    check_names(TurnsConfig(environment="m:World", side_effects=("step",)), schemas)
    with pytest.raises(
        ToolsUnusable, match=r"^turns\.side_effects: value 'jump'; allowed: names of tools: look, step$"
    ):
        check_names(TurnsConfig(environment="m:World", side_effects=("jump",)), schemas)


GOOD = {"names": ["a"], "pair": [1, "x"], "sizes": {"s": 1}, "anything": None, "either": [1]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"either": 3, "anything": {"deep": [1]}}, None),
        ({"names": ["a", 1]}, "wait: names[1] is 1; allowed: string"),
        ({"names": "a"}, "wait: names is 'a'; allowed: array"),
        ({"pair": [1]}, "wait: pair has 1 items; allowed: 2"),
        ({"pair": ["x", 1]}, "wait: pair[0] is 'x'; allowed: integer"),
        ({"sizes": {"s": "1"}}, "wait: sizes['s'] is '1'; allowed: integer"),
        ({"either": "x"}, "wait: either is 'x'; allowed: integer or array"),
        ({"names": None}, "wait: names is None; allowed: array"),
        ({"more": 1}, "wait has no argument 'more'; there are: names, pair, sizes, anything, either"),
    ],
)
def test_arguments_fit_or_the_first_that_does_not_is_named(changes, problem):
    assert call_problem(describe_tools([wait]), "wait", GOOD | changes) == problem


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"a": 1, "b": None, "unit": "km"}, None),
        ({"a": 1, "b": 2}, None),
        ({"a": True}, "multiply: a is True; allowed: integer"),
        ({"a": 1.0}, "multiply: a is 1.0; allowed: integer"),
        ({"a": 1, "b": float("inf")}, "multiply: b is inf; allowed: number or null"),
        ({"a": 1, "unit": "cm"}, "multiply: unit is 'cm'; allowed: 'm', 'km'"),
        ({}, "multiply needs the argument a"),
    ],
)
def test_numbers_nulls_and_choices(arguments, problem):
    assert call_problem(describe_tools([multiply]), "multiply", arguments) == problem


def test_a_long_value_is_shown_in_part():
    problem = call_problem(describe_tools([multiply]), "multiply", {"a": "x" * 1000})
    assert problem is not None
    assert len(problem) < 150
