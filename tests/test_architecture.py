"""The tree's rules, read from the sources with ast: who imports whom, sizes, names, and what is never used.

Every rule is a function from a tree to its complaints. It must have none here, and is shown to complain about small
trees that break it.
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

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("storage", "resources", "tasks", "workflows")
FOLDERS = (*PACKAGES, "simulation", "benchmarks", "tests", "examples")
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base", "manager"}
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}

# A layer is a package, except that tasks/ has two: its files ("task": Flyte tasks) and its folders ("folder").
LAYERS_ALLOWED = {
    "storage": {"storage"},
    "resources": {"resources"},
    "folder": {"storage", "resources", "folder"},
    "task": {"storage", "resources", "folder", "task"},
    "workflows": {"resources", "folder", "task", "workflows"},
}
FLYTE = {"flytekit", "flytekitplugins", "flyteidl", "kubernetes"}
# Third-party libraries a layer may import; a layer that is not named may import all that are not confined below.
LIBRARIES_ALLOWED = {
    "storage": {"blake3", "numpy", "pyarrow", "fsspec", "s3fs", "botocore", "pydantic", "safetensors"},
    "resources": {"numpy", "pydantic", "yaml"} | FLYTE,
    "workflows": FLYTE,
}
TRACKERS = {"tensorboard", "wandb", "mlflow"}
_FLYTE_MODULES = r"resources\.(pools|pod_template|images)|tasks\.\w+|workflows(\.\w+)?"
CONFINED = {
    "torch": r"tasks\.learning\.(?!(config|padding|follow|recorded_batches|pretrained)$)\w+"
    r"|tasks\.sampling\.engines\.(torch_engine|\w*decoder|batch|kv_cache|slot_table|tied_names|keyed_noise\w*)"
    r"|tasks\.sampling\.engines\.(weight_tensors|vllm_engine|vllm_sampler)|tasks\.grading\.reward_model",
    "triton": r"tasks\.sampling\.engines\.keyed_noise_triton",
    "vllm": r"tasks\.sampling\.engines\.vllm_names",
    **dict.fromkeys(TRACKERS, r"tasks\.reporting\.tracking"),
    **dict.fromkeys(FLYTE, _FLYTE_MODULES),
}

# Libraries that take long to import, and the modules that can be imported without waiting for them.
HEAVY = {"torch", "triton", "transformers", "datasets", "vllm", "s3fs", "math_verify", "flytekit"} | TRACKERS
LIGHT = re.compile(
    r"storage\.(?!s3$)\w+|resources\.(?!pod_template$)\w+|tasks\.(configuration|planning|prompts|reporting)\.\w+"
    r"|tasks\.\w+\.config|tasks\.sampling\.engines\.(choose|vllm_names|vllm_settings)"
)
# What containers import waits for Flyte and nothing else that is heavy. The plugin of train_elastic imports torch.
FLYTE_ENTRIES = re.compile(r"workflows(\.\w+)?|tasks\.(?!train_elastic$)\w+")


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
        nodes = ast.walk(self.tree)
        return tuple(Import(name, node.lineno, node not in late) for node in nodes for name in _imported(node))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        return [f"{module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
        return [name.value for name in node.args[:1] if isinstance(name, ast.Constant)]
    return []


class Tree:
    """The Python files below a root, in the folders that the rules are about."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = [path for folder in FOLDERS for path in root.glob(f"{folder}/**/*.py")] + list(root.glob("*.py"))
        self.sources = [Source(p.relative_to(root).as_posix(), p.read_text(encoding="utf-8")) for p in sorted(paths)]
        self.names = {source.name for source in self.sources}

    def product(self) -> list[Source]:
        """The files of the four packages."""
        return [source for source in self.sources if source.path.split("/")[0] in PACKAGES]

    def module(self, target: str) -> str | None:
        """The module of this tree that importing `target` loads: it, or what it is an attribute of."""
        while target and target not in self.names:
            target = target.rpartition(".")[0]
        return target or None

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
        return tree.layer(tree.module(target) or root) in LAYERS_ALLOWED[layer]
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
        chains = [(start,)]
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
    for kind, named, found in (
        ("packages", listed["packages"], folders),
        ("py-modules", listed["py-modules"], modules),
    ):
        for name in sorted(found ^ set(named)):
            yield f"pyproject.toml: {kind}: {name} is {'not on the disk' if name in named else 'not listed'}"


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


RULES: tuple[Callable[[Tree], Iterator[str]], ...] = (
    forbidden_imports,
    slow_imports,
    import_circles,
    large_files_and_functions,
    vague_names,
    dangerous_calls,
    misplaced_inits,
    unlisted_packages,
    stale_readme_tree,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_this_tree_keeps_the_rule(rule: Callable[[Tree], Iterator[str]]):
    assert list(rule(Tree(ROOT))) == []


def test_all_packages_are_looked_at():
    paths = {source.path.split("/")[0] for source in Tree(ROOT).sources}
    assert {*FOLDERS, "gleaner.py"} <= paths


def make_tree(root: Path, files: dict[str, str]) -> Tree:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Tree(root)


DOC = '"""Doc."""\n'
PYPROJECT = '[tool.setuptools]\npackages = ["storage"]\npy-modules = ["gleaner"]\n'
TREE_README = "# X\n```\nstorage/    bytes\n  {}  one\n```\n"
BROKEN = [
    (forbidden_imports, {"storage/a.py": "import tasks.plan"}, "storage/a.py:1: must not import tasks.plan"),
    (forbidden_imports, {"storage/a.py": "def f():\n import yaml"}, "a.py:2: must not import yaml"),
    (forbidden_imports, {"storage/a.py": "from . import b", "storage/b.py": ""}, "must not import ..b"),
    (forbidden_imports, {"resources/a.py": "from storage.b import c"}, "must not import storage.b.c"),
    (forbidden_imports, {"resources/prices.py": "import flytekit"}, "must not import flytekit"),
    (forbidden_imports, {"tasks/planning/a.py": "from flytekit import task"}, "must not import flytekit.task"),
    (forbidden_imports, {"tasks/planning/a.py": "from tasks import plan", "tasks/plan.py": ""}, "tasks.plan"),
    (forbidden_imports, {"tasks/planning/a.py": "import torch.nn as nn"}, "must not import torch.nn"),
    (forbidden_imports, {"tasks/learning/config.py": "import torch"}, "must not import torch"),
    (forbidden_imports, {"tasks/sampling/session/session.py": "import torch"}, "must not import torch"),
    (forbidden_imports, {"tasks/sampling/engines/vllm_engine.py": "from vllm import LLM"}, "must not import vllm.LLM"),
    (forbidden_imports, {"tasks/sampling/engines/a.py": "importlib.import_module('vllm.v1')"}, "not import vllm.v1"),
    (forbidden_imports, {"tasks/sampling/engines/a.py": "import torch"}, "must not import torch"),
    (forbidden_imports, {"tasks/plan.py": "import torch"}, "must not import torch"),
    (forbidden_imports, {"tasks/plan.py": "import workflows.training"}, "workflows.training"),
    (forbidden_imports, {"tasks/plan.py": "from tests.x import Y"}, "must not import tests.x.Y"),
    (forbidden_imports, {"workflows/a.py": "import storage.local"}, "must not import storage.local"),
    (forbidden_imports, {"workflows/a.py": "import numpy"}, "must not import numpy"),
    (
        slow_imports,
        {"tasks/learning/config.py": "from tasks.learning import loss", "tasks/learning/loss.py": "import torch"},
        "tasks.learning.config -> tasks.learning.loss -> torch",
    ),
    (
        slow_imports,
        {"tasks/sampling/engines/choose.py": "import tasks.learning.loss", "tasks/learning/loss.py": "import torch"},
        "tasks.sampling.engines.choose -> tasks.learning.loss -> torch",
    ),
    (
        slow_imports,
        {"workflows/a.py": "import tasks.b", "tasks/b.py": "import torch"},
        "workflows.a -> tasks.b -> torch",
    ),
    (slow_imports, {"tasks/prompts/a.py": "try:\n    import datasets\nexcept ImportError: pass"}, "-> datasets"),
    (
        import_circles,
        {"storage/a.py": "import storage.b", "storage/b.py": "def f():\n  from storage import a"},
        "storage.a -> storage.b -> storage.a",
    ),
    (large_files_and_functions, {"tests/a.py": "\n" * 401}, "tests/a.py: 401 lines; allowed: 400"),
    (large_files_and_functions, {"tasks/a.py": "class A:\n  async def f():\n" + "    1\n" * 70}, "f has 71 lines"),
    (vague_names, {"tasks/sampling/utils.py": ""}, "'utils' says nothing"),
    (vague_names, {"tests/common/test_a.py": ""}, "'common' says nothing"),
    (dangerous_calls, {"tasks/a.py": "def f():\n import pickle"}, "tasks/a.py:2: pickle"),
    (dangerous_calls, {"tasks/a.py": "from torch import load"}, "torch.load"),
    (dangerous_calls, {"tests/a.py": "x = torch.load('x')"}, "torch.load('x')"),
    (dangerous_calls, {"gleaner.py": "eval('1')"}, "gleaner.py:1: eval('1')"),
    (dangerous_calls, {"benchmarks/a.py": "np.load(f, allow_pickle=True)"}, "allow_pickle=True"),
    (misplaced_inits, {"__init__.py": DOC}, "the root must have none"),
    (misplaced_inits, {"tests/a/__init__.py": DOC}, "tests have none"),
    (misplaced_inits, {"tasks/__init__.py": DOC, "tasks/a/b.py": ""}, "tasks/a: no __init__.py"),
    (misplaced_inits, {"tasks/__init__.py": ""}, "must hold a docstring and nothing else"),
    (misplaced_inits, {"tasks/__init__.py": DOC + "X = 1"}, "must hold a docstring and nothing else"),
    (unlisted_packages, {"gleaner.py": "", "tasks/a.py": "", "storage/a.py": ""}, "packages: tasks is not listed"),
    (unlisted_packages, {"gleaner.py": ""}, "packages: storage is not on the disk"),
    (unlisted_packages, {"storage/a.py": ""}, "py-modules: gleaner is not on the disk"),
    (stale_readme_tree, {"storage/a.py": "", "README.md": TREE_README.format("b.py")}, "storage/b.py does not exist"),
    (stale_readme_tree, {"README.md": TREE_README.format("*.py")}, "README.md: storage/ does not exist"),
]
SOUND = {
    "README.md": TREE_README.format("a.py") + "```\n└── storage/\n    └── *.py  all\nLICENSE\n```\n",
    "LICENSE": "",
    "gleaner.py": "import click\nimport tasks.plan",
    "storage/__init__.py": DOC,
    "storage/a.py": "import os\nimport numpy as np\nfrom storage import b\nmodel.eval()",
    "storage/b.py": "import pyarrow.compute",
    "storage/s3.py": "import s3fs",
}
SOUND_TASKS = {
    "tasks/plan.py": "import flytekit\nfrom tasks.planning import dispatch\nfrom tasks import rollout",
    "tasks/rollout.py": "",
    "tasks/planning/dispatch.py": "import storage.a\nfrom tasks.sampling.engines.engine import Engine\nimport numpy",
    "tasks/sampling/engines/engine.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import resources.a",
    "tasks/sampling/engines/torch_engine.py": "import torch\nfrom tasks.learning import loss",
    "tasks/sampling/engines/vllm_engine.py": "import torch\nimport safetensors.torch",
    "tasks/sampling/engines/vllm_names.py": "def resolve():\n    import vllm",
    "tasks/sampling/engines/choose.py": "def build():\n    from tasks.sampling.engines.vllm_engine import VllmEngine",
    "tasks/learning/loss.py": "import torch",
    "workflows/a.py": "import datetime\nimport flytekit\nfrom tasks import plan\nfrom resources import pools",
    "resources/pools.py": "import flytekit",
}


@pytest.mark.parametrize(("rule", "files", "complaint"), BROKEN)
def test_rule_complains(tmp_path: Path, rule: Callable[[Tree], Iterator[str]], files: dict[str, str], complaint: str):
    complaints = list(rule(make_tree(tmp_path, {"pyproject.toml": PYPROJECT} | files)))
    assert any(complaint in found for found in complaints), complaints


def test_sound_tree_has_no_complaints(tmp_path: Path):
    tree = make_tree(tmp_path, {"pyproject.toml": PYPROJECT} | SOUND)
    assert [complaint for rule in RULES for complaint in rule(tree)] == []
    tree = make_tree(tmp_path, SOUND_TASKS)
    assert [complaint for rule in (forbidden_imports, import_circles) for complaint in rule(tree)] == []
    assert list(slow_imports(tree)) == ["resources.pools -> flytekit"]
