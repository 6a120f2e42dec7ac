"""What goes along when Flyte uploads code: the whole package, and the modules that a configuration names.

flytekit uploads the files of modules that are loaded, and a workflow loads most of the package only when its tasks run.
A pod would take the other files from its image, so that two versions of the code would work in one process.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from flytekit.tools import script_mode

from resources.package_code import PACKAGES, code_files
from tasks.configuration.run_config import RunConfig, dump
from tasks.configuration.user_function import PATTERN

_loaded_files = script_mode.list_imported_modules_as_files
_own_modules: set[str] = set()


def whole_uploads() -> None:
    """From now on, let uploads of this process have all files of the package, and those of `take_along`."""
    script_mode.list_imported_modules_as_files = _uploaded_files


def take_along(config: RunConfig) -> None:
    """Upload the user's modules that a configuration names, and what the modules import.

    The folder that is uploaded must hold the modules: the checkout, or a user's folder of launch plans. No module is
    imported. Other modules must be in the image.
    """
    _own_modules.update(_modules_named(dump(config)))


def _uploaded_files(source: str, modules: list[ModuleType]) -> list[str]:
    """As flytekit's own function, with more files; source: the folder from which the paths in the upload count."""
    top = Path(source).resolve()
    code = (path for path in code_files() if path.is_relative_to(top))
    more = (*code, *sorted(_own_files(top)))
    added = (str(Path(source) / path.relative_to(top)) for path in more)
    return list(dict.fromkeys([*_loaded_files(source, modules), *added]))


def _modules_named(value: Any) -> set[str]:
    """The modules of all texts "module:function" in a document."""
    if isinstance(value, str):
        return {value.partition(":")[0]} if PATTERN.fullmatch(value) else set()
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {name for each in inner for name in _modules_named(each)}


def _own_files(root: Path) -> set[Path]:
    """The files below root of the modules to take along, and of what they import."""
    found: set[Path] = set()
    waiting = sorted(_own_modules)
    while waiting:
        module = waiting.pop()
        if module.partition(".")[0] in PACKAGES:
            continue
        for path in _files_of(module, root):
            if path not in found:
                found.add(path)
                waiting += _imports_of(path, path.relative_to(root).parts[:-1])
    return found


def _files_of(module: str, root: Path) -> Iterator[Path]:
    """The files below root by which Python imports a module: its own, and those of the packages that hold it."""
    folder = root
    for part in module.split("."):
        for path in (folder / part / "__init__.py", folder / f"{part}.py"):
            if path.is_file():
                yield path
        folder /= part


def _imports_of(path: Path, package: tuple[str, ...]) -> Iterator[str]:
    """The modules that a file imports, and names of which Python alone knows whether they are modules."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        # `plan` imports the module, and says what is wrong.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parents, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
