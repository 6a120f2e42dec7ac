"""The values of a script's expressions without running the script: literals, names of literals, simple arithmetic.

A name has a value if every run of the script gives the name a single value. Further expressions raise NoLiteral with a
reason.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from tasks.adopting.adoption import one_line
from tasks.adopting.script_names import Binding, ScriptNames

_DEPTH_MAX = 40
# Lists of names of lists grow without bound.
_NODES_MAX = 20_000
_CHARACTERS_MAX = 10_000
_NUMBERS_BITS_MAX = 128
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SIGNS: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}


# What a conversion takes here, and what it does.
_CONVERSIONS: Mapping[str, tuple[Any, Callable[[Any], Any]]] = {
    "bool": (str | int | float, bool),
    "float": (str | int | float, float),
    "int": (str | int | float, int),
    "list": (list, list),
    "str": (str | int | float, str),
    "tuple": (list, list),
}


class NoLiteral(ValueError):  # noqa: N818 - reads as what was found
    """The value of an expression is known to the running script alone; the message is the reason, in one line."""


class ScriptValues:
    """The values of a script's expressions.

    arguments: words of the command line by name, the values of `args.rate` and the like. None: no command line.
    """

    def __init__(self, names: ScriptNames, arguments: Mapping[str, Any] | None = None) -> None:
        self.names = names
        self._arguments = arguments or {}
        self._left = 0

    def value(self, node: ast.expr) -> Any:
        """The value of an expression; raises NoLiteral."""
        self._left = _NODES_MAX
        try:
            return self._value(node, 0)
        except RecursionError:
            raise NoLiteral("it is nested too deeply") from None

    def once(self, name: ast.Name) -> Binding:
        """The one certain binding of a name; raises NoLiteral."""
        found = self.names.found(name)
        if found is None:
            raise NoLiteral(f"{name.id} is given no value")
        scope, bindings = found
        if len(bindings) > 1:
            lines = ", ".join(str(each.line) for each in bindings)
            raise NoLiteral(f"{name.id} is given a value {len(bindings)} times, on lines {lines}")
        [binding] = bindings
        if binding.value is None or not binding.is_certain:
            raise NoLiteral(f"{name.id} (line {binding.line}) has no value that is always the same")
        if name.id in scope.changed or name.id in self.names.scope_of(name).changed:
            raise NoLiteral(f"{name.id} (line {binding.line}) is changed later")
        return binding

    def resolved(self, node: ast.expr) -> ast.AST:
        """The node at the end of a chain of names with single values; a name without a single value stays."""
        for _ in range(_DEPTH_MAX):
            if not isinstance(node, ast.Name):
                return node
            try:
                bound = self.once(node).value
            except NoLiteral:
                return node
            if not isinstance(bound, ast.expr):
                return node if bound is None else bound
            node = bound
        return node

    def _value(self, node: ast.expr, depth: int) -> Any:
        self._left -= 1
        if depth > _DEPTH_MAX or self._left < 0:
            raise NoLiteral("it is nested too deeply, or too large")
        read = self._READERS.get(type(node))
        if read is None:
            raise NoLiteral(f"{source(node)} is no literal")
        return read(self, node, depth + 1)

    def _constant(self, node: ast.Constant, _depth: int) -> Any:
        if isinstance(node.value, bytes | complex) or node.value is ...:
            raise NoLiteral(f"{source(node)} is no value of a setting")
        return node.value

    def _name(self, node: ast.Name, depth: int) -> Any:
        bound = self.once(node).value
        if not isinstance(bound, ast.expr):
            raise NoLiteral(f"{node.id} is no literal")
        return self._value(bound, depth)

    def _list(self, node: ast.List | ast.Tuple, depth: int) -> list[Any]:
        return [self._value(each, depth) for each in node.elts]

    def _set(self, node: ast.Set, depth: int) -> list[Any]:
        return sorted((self._value(each, depth) for each in node.elts), key=str)

    def _signed(self, node: ast.UnaryOp, depth: int) -> Any:
        operand = self._value(node.operand, depth)
        if type(node.op) in _SIGNS and (isinstance(node.op, ast.Not) or _is_number(operand)):
            return _SIGNS[type(node.op)](operand)
        raise NoLiteral(f"{source(node)} is no literal")

    def _binary(self, node: ast.BinOp, depth: int) -> Any:
        return _computed(node, self._value(node.left, depth), self._value(node.right, depth))

    def _mapping(self, node: ast.Dict, depth: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                inner = self._value(value, depth)
                if not isinstance(inner, dict):
                    raise NoLiteral(f"{source(value)} is no mapping")
                made |= inner
                continue
            name = self._value(key, depth)
            if isinstance(name, list | dict):
                raise NoLiteral(f"{source(key)} is no key")
            made[name] = self._value(value, depth)
        return made

    def _joined(self, node: ast.JoinedStr, depth: int) -> str:
        parts = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                if part.conversion != -1 or part.format_spec is not None:
                    raise NoLiteral(f"{source(node)} is no literal")
                parts.append(str(self._value(part.value, depth)))
            else:
                parts.append(str(self._value(part, depth)))
        return _short("".join(parts))

    def _called(self, node: ast.Call, depth: int) -> Any:
        """`dict(a=1)`, `float("inf")`, `str(x)`, `Path(x)`: calls whose value is known."""
        name = called(node.func)
        is_plain = isinstance(node.func, ast.Name) and self.names.found(node.func) is None
        if is_plain and name == "dict" and not node.args:
            pairs = [(None if each.arg is None else ast.Constant(each.arg), each.value) for each in node.keywords]
            keys, values = [key for key, _ in pairs], [value for _, value in pairs]
            return self._mapping(ast.Dict(keys=[*keys], values=values), depth)
        if len(node.args) == 1 and not node.keywords and (name == "Path" or (is_plain and name in _CONVERSIONS)):
            inner = self._value(node.args[0], depth)
            kinds, convert = _CONVERSIONS.get(name, (str, str))
            if isinstance(inner, kinds):
                try:
                    return convert(inner)
                except (ValueError, OverflowError):
                    raise NoLiteral(f"{source(node)} is no number") from None
        raise NoLiteral(f"{source(node)} is no literal")

    def _argument(self, node: ast.Attribute, _depth: int) -> Any:
        """`args.rate`, where `args` is what the command line was read into."""
        if node.attr in self._arguments and isinstance(node.value, ast.Name) and self.holds_arguments(node.value):
            return self._arguments[node.attr]
        raise NoLiteral(f"{source(node)} is no literal")

    _READERS: ClassVar[Mapping[type[ast.expr], Callable[["ScriptValues", Any, int], Any]]] = {
        ast.Constant: _constant,
        ast.Name: _name,
        ast.List: _list,
        ast.Tuple: _list,
        ast.Set: _set,
        ast.Dict: _mapping,
        ast.UnaryOp: _signed,
        ast.BinOp: _binary,
        ast.JoinedStr: _joined,
        ast.Call: _called,
        ast.Attribute: _argument,
    }

    def holds_arguments(self, name: ast.Name) -> bool:
        """Whether a name is a parameter, or is bound by a call of parse_args or the like."""
        found = self.names.found(name)
        if found is None:
            return False
        scope, bindings = found
        is_parsed = any(
            isinstance(each, ast.Assign) and is_parsing(each.value)
            for each in ast.walk(scope.node)
            if isinstance(each, ast.Assign) and any(_names(target, name.id) for target in each.targets)
        )
        return is_parsed or (not scope.is_module and bindings[0].value is None and len(bindings) == 1)


def is_parsing(node: ast.AST) -> bool:
    """True if a call reads the command line: parse_args, parse_args_and_config, parse_args_into_dataclasses..."""
    return isinstance(node, ast.Call) and called(node.func).startswith(("parse_args", "parse_known_args"))


def called(function: ast.expr) -> str:
    """The last part of the name of what is called; empty if it has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def source(node: ast.AST) -> str:
    """An expression as it stands in the script, in one line."""
    try:
        return one_line(ast.unparse(node))
    except RecursionError:
        return "what is nested too deeply"


def _names(target: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(target))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _computed(node: ast.BinOp, left: Any, right: Any) -> Any:
    if isinstance(node.op, ast.Add) and isinstance(left, str) and isinstance(right, str):
        return _short(left + right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return [*left, *right]
    apply = _ARITHMETIC.get(type(node.op))
    if apply is None or not _is_number(left) or not _is_number(right):
        raise NoLiteral(f"{source(node)} is no literal")
    if isinstance(node.op, ast.Pow) and (abs(right) > _NUMBERS_BITS_MAX or abs(left) > 1 << 32):
        raise NoLiteral(f"{source(node)} is too large")
    try:
        made = apply(left, right)
    except ArithmeticError:
        raise NoLiteral(f"{source(node)} is no number") from None
    if isinstance(made, complex) or (isinstance(made, int) and made.bit_length() > _NUMBERS_BITS_MAX):
        raise NoLiteral(f"{source(node)} is no number of a setting")
    if isinstance(made, float) and math.isnan(made):
        raise NoLiteral(f"{source(node)} is no number")
    return made


def _short(text: str) -> str:
    if len(text) > _CHARACTERS_MAX:
        raise NoLiteral(f"it is a text of {len(text)} characters")
    return text
