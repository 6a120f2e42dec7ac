"""The names of a script's functions and classes for use by a run: "package.module:function".

Names are read from imports and definitions; no module is imported.
"""

import ast
from pathlib import Path, PurePath
from typing import Any

from tasks.adopting.script_names import Binding
from tasks.adopting.script_values import NoLiteral, ScriptValues, source

_HARMLESS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


class ScriptFunctions:
    """Names of the functions that a script uses. path: path of the script, which gives the name of its module."""

    def __init__(self, values: ScriptValues, path: Path) -> None:
        self._values = values
        self._path = path
        self.uses_script = False

    def spec(self, node: ast.expr) -> str:
        """The name of an expression's function; raises NoLiteral."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Lambda):
            raise NoLiteral("a lambda has no name; allowed: a function of a module")
        if not isinstance(node, ast.Name):
            raise NoLiteral(f"{source(node)} names no function")
        name, bound = self._followed(node)
        if isinstance(bound.value, ast.Import | ast.ImportFrom):
            return _imported(bound.value, name, parts, self._package())
        if isinstance(bound.value, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not self._values.names.scope_of(bound.value).is_module:
                reason = "is defined inside of something, where no other program finds it: move it to a module's top"
                raise NoLiteral(f"{name} (line {bound.line}) {reason}")
            self.uses_script = True
            return f"{self._module(name)}:{'.'.join([name, *parts])}"
        raise NoLiteral(f"{source(bound.value) if bound.value is not None else name} names no function")

    def made(self, node: ast.expr) -> dict[str, Any]:
        """The function and the `arguments` of `make(n=3)`, or of a class's instance; raises NoLiteral."""
        node = self._unnamed(node)
        if not isinstance(node, ast.Call):
            return {"function": self.spec(node)}
        spec = self.spec(node.func)
        if spec.startswith("functools:"):
            raise NoLiteral(f"{source(node)} has no name; allowed: a function that returns it, with literal arguments")
        arguments = self._by_position(node)
        for keyword in node.keywords:
            if keyword.arg is None:
                raise NoLiteral(f"{source(node)} has arguments that are no literals")
            arguments[keyword.arg] = self._values.value(keyword.value)
        return {"function": spec, "arguments": arguments}

    def _by_position(self, call: ast.Call) -> dict[str, Any]:
        """Arguments by position, under the parameter names of the script's own function."""
        if not call.args:
            return {}
        defined = self._values.resolved(call.func)
        skipped = 0
        if isinstance(defined, ast.ClassDef):
            own = [each for each in defined.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            defined, skipped = (own[0] if own else defined), 1
        if not isinstance(defined, ast.FunctionDef):
            raise NoLiteral(f"{source(call)} has arguments by position; allowed: by name")
        names = [each.arg for each in (*defined.args.posonlyargs, *defined.args.args)][skipped:]
        if len(call.args) > len(names):
            raise NoLiteral(f"{source(call)} has arguments by position; allowed: by name")
        return {name: self._values.value(each) for name, each in zip(names, call.args, strict=False)}

    def _unnamed(self, node: ast.expr) -> ast.expr:
        """The expression bound to a name; a node without such an expression stays."""
        found = self._values.resolved(node)
        return found if isinstance(found, ast.expr) else node

    def _followed(self, name: ast.Name) -> tuple[str, Binding]:
        """(the name at the end of a chain `a = b`, its binding)."""
        for _ in range(10):
            bound = self._values.once(name)
            if not isinstance(bound.value, ast.Name):
                return name.id, bound
            name = bound.value
        raise NoLiteral(f"{name.id} is another name's name")

    def _module(self, name: str) -> str:
        """The script as a module, named from the current directory, or else from its own."""
        path = self._path.resolve()
        try:
            path = path.relative_to(Path.cwd().resolve())
        except ValueError:
            path = PurePath(path.name)  # type: ignore[assignment]
        parts = [*path.parts[:-1], path.stem]
        if not all(part.isidentifier() for part in parts):
            raise NoLiteral(f"{name} is in {path}, whose name is no module's: rename it, or move {name} to a module")
        return ".".join(parts)

    def _package(self) -> list[str]:
        try:
            return self._module("it").split(".")[:-1]
        except NoLiteral:
            return []

    @property
    def runs_when_imported(self) -> int | None:
        """The line of the first statement at the script's top that an import would run; None without one."""
        for statement in self._values.names.module.node.body:  # type: ignore[attr-defined]
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            is_main = isinstance(statement, ast.If) and _is_main(statement)
            calls = isinstance(statement, ast.Assign | ast.AnnAssign) and _calls(statement)
            if calls or not (isinstance(statement, _HARMLESS) or is_text or is_main):
                return int(statement.lineno)
        return None


def _is_main(statement: ast.If) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(statement.test))


def _calls(statement: ast.stmt) -> bool:
    return any(isinstance(each, ast.Call) for each in ast.walk(statement))


def _imported(statement: ast.Import | ast.ImportFrom, name: str, parts: list[str], package: list[str]) -> str:
    """The module and the function of a name that an import binds, with the attributes behind it."""
    alias = next(each for each in statement.names if (each.asname or each.name.partition(".")[0]) == name)
    if isinstance(statement, ast.Import):
        path = [*(alias.name.split(".") if alias.asname else [name]), *parts]
        if len(path) < 2 or not parts:
            raise NoLiteral(f"{name} is a module; allowed: a function")
        return f"{'.'.join(path[:-1])}:{path[-1]}"
    if statement.level > len(package) + 1 or (statement.level and not package):
        raise NoLiteral(f"{name} is imported from {'.' * statement.level}, which is outside of the current directory")
    above = package[: len(package) - statement.level + 1] if statement.level else []
    module = ".".join([*above, *filter(None, [statement.module])])
    if not parts:
        return f"{module}:{alias.name}"
    # A class or a module; by its case, as the style guide of Python has it.
    is_class = alias.name[:1].isupper()
    if is_class:
        return f"{module}:{'.'.join([alias.name, *parts])}"
    return f"{'.'.join([module, alias.name, *parts[:-1]])}:{parts[-1]}"
