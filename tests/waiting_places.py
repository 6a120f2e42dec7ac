"""Where the product's code waits: calls that sleep, or that return when another process or thread has done something.

A place is a file and the function, with its class, in which such a call stands. Strings and paths have a `join`, and
mappings a `get`, so these count only as threads and queues have them: without arguments, or with a number of seconds.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("gleaner.py", "resources", "storage", "tasks", "workflows")
_ALWAYS = frozenset(
    {
        "sleep",
        "wait",
        "wait_for",
        "accept",
        "recv",
        "select",
        "poll",
        "waitpid",
        "flock",
        "communicate",
        "rest",
        "pause",
    }
)
# Unbounded as they stand, and only then told apart from those of strings and mappings.
_BARE = frozenset({"join", "get", "result", "acquire"})


@dataclass(frozen=True, order=True)
class WaitingPlace:
    """A function that waits. bare: one of its waits is given no limit where it stands."""

    place: str
    bare: bool


def waiting_places(root: Path = ROOT, parts: tuple[str, ...] = PRODUCT) -> list[WaitingPlace]:
    """All places below `root`, in order."""
    files = [
        file for part in parts for file in ([root / part] if part.endswith(".py") else (root / part).rglob("*.py"))
    ]
    # What pytest runs waits in no run: the contracts of stores, engines and environments.
    files = [file for file in files if file.name != "testing.py"]
    return sorted({place for file in files for place in places_in(file.read_text(), str(file.relative_to(root)))})


def places_in(source: str, file: str) -> set[WaitingPlace]:
    """Those of one file."""
    found: dict[str, bool] = {}
    for name, call in _calls(ast.parse(source), ()):
        found[name] = found.get(name, False) or _is_bare(call)
    return {WaitingPlace(f"{file}:{name}", bare) for name, bare in found.items()}


def _calls(node: ast.AST, within: tuple[str, ...], *, in_function: bool = False) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # What stands inside a function is a part of it.
            name = within if in_function else (*within, child.name)
            yield from _calls(child, name, in_function=in_function or not isinstance(child, ast.ClassDef))
            continue
        if isinstance(child, ast.Call) and _waits(child):
            yield ".".join(within) or "<module>", child
        yield from _calls(child, within, in_function=in_function)


def _waits(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "sleep"
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in _ALWAYS:
        return True
    is_thread = function.attr == "join" and bool(call.args) and _is_seconds(call.args[0])
    return function.attr in _BARE and (not call.args or is_thread)


def _is_seconds(given: ast.expr) -> bool:
    """Whether it is a number or a name of one, which by the rules of the tree ends with its unit."""
    text = ast.unparse(given).lower()
    is_number = isinstance(given, ast.Constant) and isinstance(given.value, int | float)
    return is_number or text.rstrip(")").endswith("_s")


def _is_bare(call: ast.Call) -> bool:
    """Whether a wait other than a sleep is given nothing that could be a limit."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return name not in ("", "sleep", "rest") and not call.args and not call.keywords
