"""The tree keeps its rules (tests/architecture.py), and each rule complains about a small tree that breaks it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.architecture import (
    FOLDERS,
    ROOT,
    RULES,
    Tree,
    ambiguous_names,
    dangerous_calls,
    estimators_named_elsewhere,
    floors,
    forbidden_imports,
    forbidden_words,
    import_circles,
    large_files_and_functions,
    misplaced_inits,
    slow_imports,
    stale_readme_tree,
    unlisted_packages,
    vacuous_tests,
    vague_names,
)
from tests.loader_rules import open_loaders

TREE = Tree(ROOT)
ALL_RULES = (*RULES, open_loaders)


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.__name__)
def test_this_tree_keeps_the_rule(rule: Callable[[Tree], Iterator[str]]):
    assert list(rule(TREE)) == []


def test_all_packages_are_looked_at():
    paths = {source.path.split("/")[0] for source in TREE.sources}
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
    (forbidden_imports, {"tasks/configuration/algorithm.py": "import torch"}, "must not import torch"),
    (forbidden_imports, {"tasks/sampling/session/session.py": "import torch"}, "must not import torch"),
    (forbidden_imports, {"tasks/sampling/engines/vllm_engine.py": "from vllm import LLM"}, "must not import vllm.LLM"),
    (forbidden_imports, {"tasks/sampling/engines/a.py": "importlib.import_module('vllm.v1')"}, "not import vllm.v1"),
    (forbidden_imports, {"tasks/sampling/engines/a.py": "import torch"}, "must not import torch"),
    (forbidden_imports, {"tasks/plan.py": "import torch"}, "must not import torch"),
    (forbidden_imports, {"tasks/plan.py": "import workflows.training"}, "workflows.training"),
    (forbidden_imports, {"tasks/plan.py": "from tests.x import Y"}, "must not import tests.x.Y"),
    (forbidden_imports, {"workflows/a.py": "import storage.local"}, "must not import storage.local"),
    (forbidden_imports, {"workflows/a.py": "import numpy"}, "must not import numpy"),
    (forbidden_imports, {"storage/a.py": "import pytest"}, "must not import pytest"),
    (forbidden_imports, {"tasks/turns/a.py": "from hypothesis import given"}, "must not import hypothesis.given"),
    (forbidden_imports, {"tasks/a.py": "from storage import testing", "storage/testing.py": ""}, "storage.testing"),
    (
        slow_imports,
        {
            "tasks/configuration/algorithm.py": "from tasks.learning import loss",
            "tasks/learning/loss.py": "import torch",
        },
        "tasks.configuration.algorithm -> tasks.learning.loss -> torch",
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
    (ambiguous_names, {"storage/crew.py": "", "tasks/planning/crew.py": ""}, "storage/crew.py, tasks/planning/crew.py"),
    (forbidden_words, {"storage/a.py": "x = 'claimed by nobody'"}, "storage/a.py:1: 'claimed by nobody'"),
    (forbidden_words, {"storage/a.py": "def of_nobody():\n    pass"}, "'of nobody'; say which process or member"),
    (forbidden_words, {"tasks/a.py": "def f(spot_worker):\n    pass"}, "tasks/a.py:1: 'spot worker'; say member"),
    (forbidden_words, {"tasks/a.py": "def f(x):\n    'The members of a group.'"}, "say response of a group"),
    (estimators_named_elsewhere, {"tasks/learning/a.py": "if name == 'gae': pass"}, "a.py:1: 'gae' is named"),
    (estimators_named_elsewhere, {"tasks/configuration/a.py": "RELATIVE = {'grpo', 'rloo'}"}, "a.py:1: 'rloo' is"),
    (
        floors,
        {
            "tasks/planning/a.py": "from tasks.sampling import b",
            "tasks/sampling/b.py": "",
            "tasks/sampling/c.py": "def f():\n    import tasks.planning.a",
        },
        "planning -> sampling -> planning",
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
    (open_loaders, {"tasks/a.py": "AutoConfig.from_pretrained(x, local_files_only=True)"}, "trust_remote_code=False"),
    (open_loaders, {"tasks/a.py": "def f():\n f().from_pretrained(x)"}, "a.py:2: f().from_pretrained without local_fi"),
    (open_loaders, {"gleaner.py": "t.A.from_pretrained(x, **given)"}, "t.A.from_pretrained without"),
    (open_loaders, {"tasks/a.py": "f.from_pretrained(x, local_files_only=True, trust_remote_code=y)"}, "trust_remote"),
    (
        open_loaders,
        {"benchmarks/a.py": "load = AutoTokenizer.from_pretrained"},
        "AutoTokenizer.from_pretrained without",
    ),
    (
        open_loaders,
        {"tasks/a.py": "partial(t.AutoModel.from_config, x)"},
        "from_config without trust_remote_code=False",
    ),
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
    (vacuous_tests, {"tests/test_a.py": "def test_x():\n    f()"}, "test_a.py:1: test_x asserts nothing"),
    (
        vacuous_tests,
        {"tests/test_a.py": "class TestA:\n  def test_x(self):\n    b.f(1)", "tests/b.py": "def f(x):\n    g(x)"},
        "tests/test_a.py:2: test_x asserts nothing",
    ),
]
SOUND = {
    "README.md": TREE_README.format("a.py") + "```\n└── storage/\n    └── *.py  all\nLICENSE\n```\n",
    "LICENSE": "",
    "gleaner.py": "import click\nimport tasks.plan",
    "storage/__init__.py": DOC,
    "storage/a.py": "import os\nimport numpy as np\nfrom storage import b\nmodel.eval()",
    "storage/b.py": "import pyarrow.compute\npartial(AutoModel.from_config, c, trust_remote_code=False)"
    "\nQ.from_config(c)\nA.from_pretrained(x, local_files_only=True, trust_remote_code=False)",
    "storage/s3.py": "import s3fs",
    "storage/testing.py": "import pytest",
    "tests/b.py": "from storage import testing\ndef f(x):\n    g(x)\ndef g(x):\n    assert x",
    "tests/test_a.py": "def test_x():\n    b.f(1)\ndef test_y():\n    with pytest.raises(E): h()\n"
    "def test_z():\n    torch.testing.assert_close(1, 1)",
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
    assert [complaint for rule in ALL_RULES for complaint in rule(tree)] == []
    tree = make_tree(tmp_path, SOUND_TASKS)
    assert [complaint for rule in (forbidden_imports, import_circles) for complaint in rule(tree)] == []
    assert list(slow_imports(tree)) == ["resources.pools -> flytekit"]
