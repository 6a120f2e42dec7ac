"""The names of a Python script with the bindings of each name. The script is parsed, never run.

This module knows no library. A binding outside of branches, loops and handlers is certain.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_CHANGES = frozenset(
    ("append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update")
)


@dataclass(frozen=True, eq=False)
class Binding:
    """A place that binds a name.

    Attributes:
        line: line of the binding.
        value: expression or statement of the value; None if the name gets a part of the value, or an unknown value.
        is_certain: True if every run of the script makes the binding.
    """

    line: int
    value: ast.AST | None
    is_certain: bool


@dataclass(eq=False)
class Scope:
    """A module, function, class or comprehension.

    Attributes:
        node: node of the scope.
        parent: the scope around; None for the module.
        bindings: bindings by name, in order.
        changed: names of values that the scope changes in place.
        elsewhere: scopes of names declared global or nonlocal.
    """

    node: ast.AST
    parent: "Scope | None" = None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    elsewhere: dict[str, "Scope"] = field(default_factory=dict)

    @property
    def is_module(self) -> bool:
        return self.parent is None


@dataclass(frozen=True, eq=False)
class Change:
    """An assignment `base.name = value`, or setattr(base, name, value).

    Attributes:
        base: expression of the changed object.
        name: name of the attribute.
        value: expression of the value; None: unknown.
        line: line of the assignment.
        is_certain: True if every run of the script makes the assignment.
    """

    base: ast.expr
    name: str
    value: ast.expr | None
    line: int
    is_certain: bool


class ScriptNames:
    """Every scope of a script and its bindings; raises RecursionError never, whatever the depth of an expression."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope(tree)
        self.changes: list[Change] = []
        self._scopes: dict[int, Scope] = {}
        stack: list[tuple[ast.AST, Scope, bool]] = [(each, self.module, True) for each in reversed(tree.body)]
        while stack:
            node, scope, is_certain = stack.pop()
            self._scopes[id(node)] = scope
            stack += reversed(list(self._enter(node, scope, is_certain)))

    def scope_of(self, node: ast.AST) -> Scope:
        """The scope in which a node of the script stands."""
        return self._scopes[id(node)]

    def found(self, name: ast.Name) -> tuple[Scope, list[Binding]] | None:
        """(the scope that binds a used name, the bindings in order); None for an unknown name."""
        scope: Scope | None = self.scope_of(name)
        is_first = True
        while scope is not None:
            # The names of a class are not seen in its methods.
            if (is_first or not isinstance(scope.node, ast.ClassDef)) and name.id in scope.bindings:
                return scope, scope.bindings[name.id]
            scope, is_first = scope.parent, False
        return None

    def _enter(self, node: ast.AST, scope: Scope, is_certain: bool) -> Iterator[tuple[ast.AST, Scope, bool]]:
        """Record the bindings of a node; yields the node's children, each with scope and certainty."""
        self._record(node, scope, is_certain)
        inner: Iterable[ast.AST] = ()
        here = scope
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            here = Scope(node, scope)
            inner = node.body if isinstance(node.body, list) else [node.body]
            if not isinstance(node, ast.ClassDef):
                for argument in _parameters(node.args):
                    _bind(here, argument.arg, Binding(argument.lineno, None, is_certain=False))
        elif isinstance(node, _COMPREHENSIONS):
            here = Scope(node, scope)
            for part in node.generators:
                _bind_target(here, part.target, None, is_certain=False)
            inner = ast.iter_child_nodes(node)
        elif isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try | ast.TryStar | ast.Match):
            for child in ast.iter_child_nodes(node):
                is_main = isinstance(node, ast.If) and child in node.body and _asks_for_main(node.test)
                yield child, scope, is_certain and is_main
            return
        within = {id(each) for each in inner}
        for child in ast.iter_child_nodes(node):
            is_inside = id(child) in within
            yield child, here if is_inside else scope, is_certain or (is_inside and here is not scope)

    def _record(self, node: ast.AST, scope: Scope, is_certain: bool) -> None:
        if isinstance(node, ast.Global | ast.Nonlocal):
            outer = self.module if isinstance(node, ast.Global) else scope.parent or self.module
            scope.elsewhere |= dict.fromkeys(node.names, outer)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                _bind(scope, name, Binding(node.lineno, node, is_certain))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            _bind(scope, node.name, Binding(node.lineno, node, is_certain))
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete):
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
            if value is not None or not isinstance(node, ast.AnnAssign):
                for target in targets:
                    self._assign(scope, target, value, is_certain)
        elif isinstance(node, ast.Call):
            self._record_call(node, scope, is_certain)
        else:
            _bind_passing(scope, node)

    def _record_call(self, node: ast.Call, scope: Scope, is_certain: bool) -> None:
        """setattr, and methods that change a list or mapping in place."""
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _CHANGES and isinstance(function.value, ast.Name):
            scope.changed.add(function.value.id)
        if isinstance(function, ast.Name) and function.id == "setattr" and len(node.args) == 3:
            base, name, value = node.args
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self.changes.append(Change(base, name.value, value, node.lineno, is_certain))

    def _assign(self, scope: Scope, target: ast.expr, value: ast.expr | None, is_certain: bool) -> None:
        if isinstance(target, ast.Attribute):
            self.changes.append(Change(target.value, target.attr, value, target.lineno, is_certain))
        elif isinstance(target, ast.Subscript):
            if isinstance(target.value, ast.Name):
                scope.changed.add(target.value.id)
        else:
            _bind_target(scope, target, value, is_certain)


def _bind_passing(scope: Scope, node: ast.AST) -> None:
    """Bind the names of loops, `with`, `:=`, `except` and `match`, without a value."""
    if isinstance(node, ast.NamedExpr | ast.For | ast.AsyncFor):
        _bind_target(scope, node.target, None, is_certain=False)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        _bind_target(scope, node.optional_vars, None, is_certain=False)
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
        _bind(scope, node.name, Binding(node.lineno, None, is_certain=False))
    elif isinstance(node, ast.MatchMapping) and node.rest is not None:
        _bind(scope, node.rest, Binding(node.lineno, None, is_certain=False))


def _bind(scope: Scope, name: str, binding: Binding) -> None:
    home = scope.elsewhere.get(name, scope)
    home.bindings.setdefault(name, []).append(binding)


def _bind_target(scope: Scope, target: ast.expr, value: ast.expr | None, is_certain: bool) -> None:
    """Bind the names of a target; `a, b = 1, 2` in pairs, and the parts of any different tuple without a value."""
    if isinstance(target, ast.Name):
        _bind(scope, target.id, Binding(target.lineno, value, is_certain))
    elif isinstance(target, ast.Starred):
        _bind_target(scope, target.value, None, is_certain)
    elif isinstance(target, ast.Tuple | ast.List):
        parts = target.elts
        values: list[ast.expr | None] = [None] * len(parts)
        is_whole = not any(isinstance(each, ast.Starred) for each in parts)
        if isinstance(value, ast.Tuple | ast.List) and is_whole and len(value.elts) == len(parts):
            values = [*value.elts]
        for part, each in zip(parts, values, strict=True):
            _bind_target(scope, part, each, is_certain)


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    optional = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *optional]


def _asks_for_main(test: ast.expr) -> bool:
    """Whether a test is `__name__ == "__main__"`."""
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"
