"""The type of a counting input: a number below 1 is refused on entry, before a pod exists.

`pyflyte run` converts inputs on its own machine, and flytekit those of launch plans when they are registered. A number
from the console is refused by the pod that reads it.
"""

from typing import Any

from click import BadParameter
from flytekit.core.context_manager import FlyteContext
from flytekit.core.type_engine import TypeEngine, TypeTransformer
from flytekit.models.literals import Literal
from flytekit.models.types import LiteralType


class Count(int):
    """A number of 1 or more; Flyte sees an ordinary integer."""


class _CountTransformer(TypeTransformer[Count]):  # type: ignore[misc]  # flytekit has no types for it
    def __init__(self) -> None:
        super().__init__("count", Count, enable_type_assertions=False)

    def get_literal_type(self, _: type[Count]) -> LiteralType:
        return TypeEngine.to_literal_type(int)

    def to_literal(self, context: FlyteContext, value: Any, _: type[Count], expected: LiteralType) -> Literal:
        return TypeEngine.to_literal(context, _checked(value), int, expected)

    def to_python_value(self, context: FlyteContext, literal: Literal, _: type[Count]) -> Count:
        return Count(_checked(TypeEngine.to_python_value(context, literal, int)))


def _checked(value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        # `pyflyte run` prints it as a line, without a traceback.
        raise BadParameter(f"count: value {value!r}; allowed: 1 or more")
    return int(value)


TypeEngine.register(_CountTransformer())
