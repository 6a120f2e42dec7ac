"""The tree's rules, read from the sources with ast: who imports whom, sizes, names, words, and what is never used.

Every rule is a function from a tree to its complaints; `test_architecture.py` applies them.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tasks.configuration.estimators import ESTIMATORS

ROOT = Path(__file__).parents[1]
PACKAGES = ("storage", "resources", "tasks", "workflows", "workflows_flyte2")
FOLDERS = (*PACKAGES, "simulation", "benchmarks", "tests", "examples")
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base", "manager"}
# Names that mean the same thing wherever they stand: a workflow, its task and what the task does; a section of the
# configuration; the built-in task and its reward; what stops a step and how it is shown; the tests of a protocol.
SAME_THING = {"arithmetic", "config", "evaluation", "forecast", "iteration", "nonfinite", "regrading", "testing"}
SAME_THING |= {"training"}
FORBIDDEN_WORDS = {
    r"\b(nobody|nobodys|whoever|somebody|anybody)\b": "which process or member",
    r"\bmembers? of (a|the|its) group\b": "response of a group",
    r"\b(rollout|gpu|spot) workers?\b": "member",
}
NAMES_ESTIMATORS = {"tasks.configuration.estimators", "tasks.configuration.presets"}
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}

# A layer is a package, except that tasks/ has two: its files ("task": Flyte tasks) and its folders ("folder").
LAYERS_ALLOWED = {
    "storage": {"storage"},
    "resources": {"resources"},
    "folder": {"storage", "resources", "folder"},
    "task": {"storage", "resources", "folder", "task"},
    "workflows": {"resources", "folder", "task", "workflows"},
    "workflows_flyte2": {"storage", "resources", "folder", "task", "workflows", "workflows_flyte2"},
}
FLYTE, S3 = {"flytekit", "flytekitplugins", "flyteidl", "kubernetes"}, {"s3fs", "aiobotocore", "botocore"}
# Third-party libraries a layer may import; a layer that is not named may import all that are not confined below.
LIBRARIES_ALLOWED = {
    "storage": {"blake3", "numpy", "pyarrow", "fsspec", "obstore", "pydantic", "safetensors", "pytest"} | S3,
    "resources": {"numpy", "pydantic", "urllib3", "yaml"} | FLYTE,
    "workflows": {"click"} | FLYTE,
}
TRACKERS = {"tensorboard", "wandb", "mlflow"}
TESTING = re.compile(r"(storage|tasks\.sampling\.engines|tasks\.turns)\.testing")  # the contracts: for tests alone
_FLYTE_MODULES = r"resources\.(pools|pod_template|flyte_admin|kubernetes_api)|tasks\.\w+|workflows(_flyte2)?(\.\w+)?"
CONFINED = {
    "torch": r"tasks\.learning\.(?!(padding|journal_follower|recorded_batches|pretrained)$)\w+"
    r"|tasks\.sampling\.engines\.(torch_engine|adapter_merge|\w*decoder|batch|kernels|window|row_attention|step_graphs|\w+_cache|slot_table|steady_positions|keyed_noise\w*|suffix_match_triton|weight_tensors|vllm_(engine|sampler|siblings|handover|patch))"
    r"|tasks\.(external\.verl|models\.stored_names|preparing\.(model_trial|small_copy)|grading\.reward_model|(device|doctor)\.\w+)",
    "triton": r"tasks\.sampling\.engines\.(keyed_noise|suffix_match)_triton",
    "flyte": r"workflows_flyte2\.\w+",
    "vllm": r"tasks\.sampling\.engines\.vllm_names",
    **dict.fromkeys(("pytest", "hypothesis"), TESTING.pattern),
    **dict.fromkeys(TRACKERS, r"tasks\.reporting\.tracking"),
    **dict.fromkeys(FLYTE, _FLYTE_MODULES),
}

# Libraries that take long to import, and the modules that need not wait for them.
HEAVY = {"torch", "triton", "transformers", "datasets", "vllm", "s3fs", "math_verify", "flytekit"} | TRACKERS
LIGHT = re.compile(
    r"storage\.(?!(stores\.)?(s3|s3_answers|cloud)$)[\w.]+|resources\.(?!(pod_template|flyte_admin)$)\w+|tasks\.(configuration|crew_model|planning|prompts|reporting)\.\w+"
    r"|tasks\.sharing\.(?!phase_trainer$)\w+|tasks\.sampling\.engines\.(choose|vllm_names|vllm_settings)"
)
# What containers import waits for Flyte and nothing else that is heavy.
FLYTE_ENTRIES = re.compile(r"workflows(\.\w+)?|tasks\.\w+")


@dataclass(frozen=True)
class Import:
    """One imported name; `eager` when it happens while the module itself is imported."""

    target: str
    line: int
    eager: bool


@dataclass(frozen=True)
class Source:
    """One Python file of the tree."""

    path: str
    text: str

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        late = {
            inner
            for outer in ast.walk(self.tree)
            if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(outer)
            for inner in ast.walk(outer)
        }
        nodes = (n for n in ast.walk(self.tree) if isinstance(n, ast.Import | ast.ImportFrom | ast.Call))
        return tuple(Import(name, node.lineno, node not in late) for node in nodes for name in _imported(node))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        return [f"{module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and _last_name(node.func) == "import_module":
        return [name.value for name in node.args[:1] if isinstance(name, ast.Constant) and isinstance(name.value, str)]
    return []


def _last_name(called: ast.expr) -> str:
    """What a called expression ends with: f of `a.b.f`; empty if it is no name. Unparsing would take seconds."""
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


class Tree:
    """The Python files below a root, in the folders that the rules are about."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = [path for folder in FOLDERS for path in root.glob(f"{folder}/**/*.py")] + list(root.glob("*.py"))
        self.sources = [Source(p.relative_to(root).as_posix(), p.read_text(encoding="utf-8")) for p in sorted(paths)]
        self.names = {source.name for source in self.sources}
        self._modules: dict[str, str | None] = {}

    def product(self) -> list[Source]:
        """The files of the four packages."""
        return [source for source in self.sources if source.path.split("/")[0] in PACKAGES]

    def module(self, target: str) -> str | None:
        """The module of this tree that importing `target` loads: it, or what it is an attribute of."""
        if target not in self._modules:
            name = target
            while name and name not in self.names:
                name = name.rpartition(".")[0]
            self._modules[target] = name or None
        return self._modules[target]

    def layer(self, module: str) -> str:
        parts = module.split(".")
        if parts[0] != "tasks":
            return parts[0]
        in_folder = len(parts) > 2 or (self.root / "/".join(parts)).is_dir()
        return "folder" if in_folder else "task"


def forbidden_imports(tree: Tree) -> Iterator[str]:
    for source in tree.product():
        for imported in source.imports:
            if not _allowed(tree, source, imported.target):
                yield f"{source.path}:{imported.line}: must not import {imported.target}"


def _allowed(tree: Tree, source: Source, target: str) -> bool:
    layer, root = tree.layer(source.name), target.split(".", maxsplit=1)[0]
    if root in FOLDERS or root == "gleaner":
        module = tree.module(target) or root
        return tree.layer(module) in LAYERS_ALLOWED[layer] and not TESTING.fullmatch(module)
    if root in sys.stdlib_module_names:
        return True
    if root in CONFINED and not re.fullmatch(CONFINED[root], source.name):
        return False
    return bool(root) and root in LIBRARIES_ALLOWED.get(layer, {root})


def slow_imports(tree: Tree) -> Iterator[str]:
    """Light modules, and Flyte's entries, that reach a heavy library by what they import eagerly."""
    eager = {source.name: [i.target for i in source.imports if i.eager] for source in tree.sources}
    entries = {name for name in eager if FLYTE_ENTRIES.fullmatch(name) and tree.layer(name) in ("task", "workflows")}
    for start in sorted({*filter(LIGHT.fullmatch, eager), *entries}):
        heavy = HEAVY - FLYTE if start in entries else HEAVY
        chains: list[tuple[str, ...]] = [(start,)]
        seen = {start}
        while chains:
            chain = chains.pop()
            for target in eager[chain[-1]]:
                if target.split(".")[0] in heavy:
                    yield f"{' -> '.join(chain)} -> {target}"
                module = tree.module(target)
                if module and module not in seen:
                    seen.add(module)
                    chains.append((*chain, module))


def import_circles(tree: Tree) -> Iterator[str]:
    """Circles, counting late imports, too: putting one off hides a circle and does not remove it."""
    graph = {source.name: {tree.module(i.target) for i in source.imports} - {source.name} for source in tree.sources}
    try:
        TopologicalSorter({name: targets - {None} for name, targets in graph.items()}).prepare()
    except CycleError as error:
        yield " -> ".join(reversed(error.args[1]))


def floors(tree: Tree) -> Iterator[str]:
    """Folders of tasks/ that import each other, by whatever way: they are floors, and `configuration` is the lowest."""
    below: dict[str, set[str]] = {}
    for source in tree.product():
        if source.name.startswith("tasks.") and tree.layer(source.name) == "folder":
            folder = source.name.split(".")[1]
            imported = [tree.module(each.target) or "" for each in source.imports]
            others = {name.split(".")[1] for name in imported if re.match(r"tasks\.\w+\.", name)}
            below.setdefault(folder, set()).update(others - {folder})
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        yield " -> ".join(reversed(error.args[1]))


def large_files_and_functions(tree: Tree) -> Iterator[str]:
    for source in tree.sources:
        lines = len(source.text.splitlines())
        if lines > FILE_LINES_MAX:
            yield f"{source.path}: {lines} lines; allowed: {FILE_LINES_MAX}"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    yield f"{source.path}:{node.lineno}: {node.name} has {lines} lines; allowed: {FUNCTION_LINES_MAX}"


def vague_names(tree: Tree) -> Iterator[str]:
    for source in tree.sources:
        for part in source.path.removesuffix(".py").split("/"):
            if part in VAGUE_NAMES or part.removeprefix("_") in VAGUE_NAMES:
                yield f"{source.path}: {part!r} says nothing"


def dangerous_calls(tree: Tree) -> Iterator[str]:
    """Whatever runs code that it finds in bytes or text."""
    for source in tree.sources:
        for imported in source.imports:
            if imported.target.split(".")[0] in PICKLERS or imported.target in ("torch.load", "torch.save"):
                yield f"{source.path}:{imported.line}: {imported.target}"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                unpickles = any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords)
                if name in ("eval", "exec", "torch.load", "torch.save") or unpickles:
                    yield f"{source.path}:{node.lineno}: {ast.unparse(node)[:60]}"


def misplaced_inits(tree: Tree) -> Iterator[str]:
    """Packages without an __init__ (Flyte finds the wrong root), or one that is more than a docstring."""
    if (tree.root / "__init__.py").exists():
        yield "__init__.py: the root must have none"
    for source in tree.sources:
        folder = source.path.rpartition("/")[0]
        if source.path.startswith("tests/"):
            if source.path.endswith("/__init__.py"):
                yield f"{source.path}: tests have none"
        elif folder and folder != "examples" and not (tree.root / folder / "__init__.py").exists():
            yield f"{folder}: no __init__.py"
        if source.path.endswith("__init__.py") and (not ast.get_docstring(source.tree) or len(source.tree.body) > 1):
            yield f"{source.path}: must hold a docstring and nothing else"


def unlisted_packages(tree: Tree) -> Iterator[str]:
    """Differences between pyproject.toml and the disk; what is not listed is missing after an installation."""
    listed = tomllib.loads((tree.root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {source.path.rpartition("/")[0].replace("/", ".") for source in tree.product()}
    modules = {source.name for source in tree.sources if "/" not in source.path}
    for kind, found in (("packages", folders), ("py-modules", modules)):
        for name in sorted(found ^ set(listed[kind])):
            yield f"pyproject.toml: {kind}: {name} is {'not on the disk' if name in listed[kind] else 'not listed'}"


def stale_readme_tree(tree: Tree) -> Iterator[str]:
    """Lines of README's tree, a code block with a line `storage/ ...`, that name nothing on the disk.

    A line is a name, then at least one space and its description; a folder's name ends with '/', what is in it is
    indented by two or more spaces (or tree characters). '*' matches as in a shell.
    """
    readme = tree.root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if not re.search(r"^\W*storage/(\s|$)", block, flags=re.MULTILINE):
            continue
        folders: list[tuple[int, str]] = []
        for line in filter(str.strip, block.splitlines()):
            indent = len(line) - len(line.lstrip(" │├└─"))
            name = line[indent:].split()[0]
            folders = [(depth, folder) for depth, folder in folders if depth < indent]
            path = "".join(folder for _, folder in folders) + name
            if name.endswith("/"):
                folders.append((indent, name))
            if not any(tree.root.glob(path.rstrip("/"))):
                yield f"README.md: {path} does not exist"


def ambiguous_names(tree: Tree) -> Iterator[str]:
    """Files of one name in several folders, unless the name means the same thing in all of them."""
    named: dict[str, list[str]] = {}
    for source in tree.sources:
        folder, _, file = source.path.rpartition("/")
        # A benchmark is named after what it measures, a section as it is called in the configuration.
        elsewhere = folder.startswith(("tests", "benchmarks", "examples", "tasks/configuration"))
        if not elsewhere and not file.startswith("__"):
            named.setdefault(file.removesuffix(".py"), []).append(source.path)
    for name, paths in sorted(named.items()):
        if len(paths) > 1 and name not in SAME_THING:
            yield f"{', '.join(paths)}: two things of one name"


def forbidden_words(tree: Tree) -> Iterator[str]:
    """Words outside the glossary of ARCHITECTURE.md, in names, texts and docstrings of all but the tests."""
    for source in (each for each in tree.sources if not each.path.startswith("tests/")):
        for line, text in _words_of(source):
            for pattern, instead in FORBIDDEN_WORDS.items():
                if re.search(pattern, text, flags=re.IGNORECASE):
                    yield f"{source.path}:{line}: {text.strip()[:60]!r}; say {instead}"


def estimators_named_elsewhere(tree: Tree) -> Iterator[str]:
    """Names of advantage estimators as texts outside their table and the presets, such as in a comparison."""
    for source in tree.product():
        if source.name not in NAMES_ESTIMATORS:
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ESTIMATORS:
                    yield f"{source.path}:{node.lineno}: {node.value!r} is named; ask the estimator what it needs"


def _words_of(source: Source) -> Iterator[tuple[int, str]]:
    """(line, text) of each name that the file binds, and of each of its texts, line by line."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name.replace("_", " ")
        elif isinstance(node, ast.Name | ast.arg):
            yield node.lineno, (node.id if isinstance(node, ast.Name) else node.arg).replace("_", " ")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, text in enumerate(node.value.splitlines()):
                yield node.lineno + offset, text


def vacuous_tests(tree: Tree) -> Iterator[str]:
    """Test functions that can only fail by an exception: neither they nor what they call in tests/ asserts anything."""
    functions = [
        (source, node, set(_called(node)))
        for source in tree.sources
        if source.path.startswith("tests/")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    asserting = {"raises", "warns", "fail"}
    while found := {
        node.name
        for _, node, called in functions
        if node.name not in asserting and (called & asserting or _asserts(node))
    }:
        asserting |= found
    for source, node, _ in functions:
        if node.name.startswith("test_") and node.name not in asserting:
            yield f"{source.path}:{node.lineno}: {node.name} asserts nothing"


def _called(node: ast.AST) -> Iterator[str]:
    """The last names of what is called, by whatever way it is reached."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            yield _last_name(inner.func)


def _asserts(node: ast.AST) -> bool:
    """Whether it holds an assert, or calls one of a library, as torch.testing.assert_close."""
    plain = any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
    return plain or any(name.startswith("assert_") for name in _called(node))


RULES: tuple[Callable[[Tree], Iterator[str]], ...] = (
    forbidden_imports,
    slow_imports,
    import_circles,
    floors,
    large_files_and_functions,
    vague_names,
    ambiguous_names,
    forbidden_words,
    estimators_named_elsewhere,
    dangerous_calls,
    misplaced_inits,
    unlisted_packages,
    stale_readme_tree,
    vacuous_tests,
)
