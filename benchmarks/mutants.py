"""One-line breaks drawn over the product's code, and whether the tests of the broken module notice them.

    python -m benchmarks.mutants [--json] [--mutants N] [--seed N] [--minutes N] [--processes N]

Each break is written into a copy of the tree. The tests of the module run there until one fails, at most FILES_MAX
files: the test files that mirror the module, the test files that import it, and the mirrors of the product modules that
import it. A break counts as noticed only if the failing test passes in the undamaged copy. A break that lives is
printed with its line: a test is missing, or the break changes no result (which only a reader can say). A test run that
takes longer than `--minutes` notices nothing, unless the undamaged tree is faster. Code that needs vLLM or a GPU is
left out. Needs 2 GiB for each process.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from benchmarks.reporting import Target, finish
from tests.architecture import Tree

ROOT = Path(__file__).parents[1]
PRODUCT = ("storage", "resources", "tasks", "workflows")
COPIED = (*PRODUCT, "simulation", "benchmarks", "examples", "tests", "docs")
UNTRIED = re.compile(r"tasks/sampling/engines/(vllm_|keyed_noise_triton|step_graphs)|tasks/device/")
FILES_MAX = 12
NOTICED_MIN = 0.9
HANGS = "the tests do not end"
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
}
SWAPPED_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """A line of a file, and the broken line in its place.

    Attributes:
        path: relative to the root of the tree.
        line: number of the line, from 1.
        before: the line as it is.
        after: the broken line.
    """

    path: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Verdict:
    """What the tests say of a mutant.

    Attributes:
        mutant: the break.
        noticed_by: id of the first test that fails with the break, if its file passes without; "" if the break lives.
        files: number of test files that the module has.
    """

    mutant: Mutant
    noticed_by: str
    files: int


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All breaks of a file, in the order of its lines. Annotations, decorators, assertions and logs are left alone."""
    lines = source.splitlines()
    found = []
    for node in _changeable(ast.parse(source)):
        for line, start, end, text in _edits(node, lines):
            before = lines[line - 1]
            data = before.encode()
            after = (data[:start] + text.encode() + data[end:]).decode()
            if after != before:
                found.append(Mutant(path, line, before, after))
    return sorted(set(found), key=lambda mutant: (mutant.line, mutant.after))


def _changeable(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes within functions that a break may touch."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                yield from _below(statement)


def _below(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assert | ast.JoinedStr | ast.Raise):
        return
    if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_log(node.value)):
        return
    yield node
    for name, field in ast.iter_fields(node):
        if name not in ("annotation", "decorator_list", "returns"):
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from _below(child)


def _is_log(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "log"


def _edits(node: ast.AST, lines: Sequence[str]) -> Iterator[tuple[int, int, int, str]]:
    """The breaks of one node: line, first and last byte in the line, and the text in between."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _between(node.left, node.comparators[0], COMPARISONS[type(node.ops[0])], lines)
    elif isinstance(node, ast.BoolOp):
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield from _between(node.values[0], node.values[1], words, lines)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield from _between(node.left, node.right, OPERATORS[type(node.op)], lines)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        if node.lineno == node.operand.lineno:
            yield node.lineno, node.col_offset, node.operand.col_offset, ""
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        test = node.test
        if test.lineno == test.end_lineno and test.end_col_offset is not None:
            text = lines[test.lineno - 1].encode()[test.col_offset : test.end_col_offset].decode()
            yield test.lineno, test.col_offset, test.end_col_offset, f"not ({text})"
    else:
        yield from _edits_of_words(node)


def _edits_of_words(node: ast.AST) -> Iterator[tuple[int, int, int, str]]:
    where = getattr(node, "lineno", None)
    if where is None or where != getattr(node, "end_lineno", None):
        return
    line, start, end = where, node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield line, start, end, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) <= 1:
        # A larger number is a size or a limit: one more rarely changes a result.
        yield line, start, end, str(node.value + 1)
    elif isinstance(node, ast.Name) and node.id in SWAPPED_NAMES:
        yield line, start, end, SWAPPED_NAMES[node.id]
    elif isinstance(node, ast.Continue | ast.Break):
        yield line, start, end, "break" if isinstance(node, ast.Continue) else "continue"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield line, start, end, "pass"


def _between(
    left: ast.expr, right: ast.expr, words: tuple[str, str], lines: Sequence[str]
) -> Iterator[tuple[int, int, int, str]]:
    """The operator between two operands of one line; parentheses around an operand stay."""
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    gap = lines[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
    at = re.search(rf"(?<![\w=<>!*/]){re.escape(words[0])}(?![\w=<>*/])", gap)
    if at is not None:
        first = left.end_col_offset + len(gap[: at.start()].encode())
        yield right.lineno, first, first + len(words[0].encode()), words[1]


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """`count` breaks, each equally likely, over all product files that are tried; the same for the same seed."""
    files = sorted(path for folder in PRODUCT for path in root.glob(f"{folder}/**/*.py"))
    names = [path.relative_to(root).as_posix() for path in files]
    drawn = [
        mutant
        for name in names
        if not UNTRIED.match(name)
        for mutant in mutants_of(name, (root / name).read_text(encoding="utf-8"))
    ]
    return random.Random(seed).sample(drawn, count)


def mapped_tests(root: Path, path: str) -> list[str]:
    """The test files of a module in the order in which they run; those of its folder where there are none."""
    users = _importing(root)[path.removesuffix(".py").replace("/", ".")]
    importing = [root / user for user in users if Path(user).name.startswith("test_")]
    of_users = (test for user in users if user.startswith(PRODUCT) for test in _mirrors(root, user))
    found = [*_mirrors(root, path), *importing, *of_users]
    chosen = list(dict.fromkeys(found)) or sorted((root / "tests" / path).parent.glob("test_*.py"))
    return [test.relative_to(root).as_posix() for test in chosen[:FILES_MAX]]


def _mirrors(root: Path, path: str) -> list[Path]:
    module = Path(path)
    tests = (root / "tests" / module.parent).glob("test_*.py")
    return sorted(test for test in tests if re.fullmatch(rf"test_{re.escape(module.stem)}(_\w+)?", test.stem))


@cache
def _importing(root: Path) -> dict[str, list[str]]:
    """The files that import each module, the smallest file first."""
    tree, found = Tree(root), defaultdict[str, list[str]](list)
    for source in sorted(tree.sources, key=lambda source: (len(source.text), source.path)):
        for module in {tree.module(one.target) for one in source.imports} - {None}:
            found[str(module)].append(source.path)
    return found


def judge(copy: Path, mutant: Mutant, limit_s: float) -> Verdict:
    """Break the copy, run the module's tests, and mend the copy again."""
    tests = mapped_tests(copy, mutant.path)
    broken = copy / mutant.path
    source = broken.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    assert lines[mutant.line - 1].rstrip("\n") == mutant.before, f"{mutant.path}:{mutant.line} is another line"
    lines[mutant.line - 1] = mutant.after + "\n"
    try:
        broken.write_text("".join(lines), encoding="utf-8")
        failed = _first_failure(copy, tests, limit_s) if tests else ""
    finally:
        broken.write_text(source, encoding="utf-8")
    if failed and _first_failure(copy, tests if failed == HANGS else [failed.split("::")[0]], limit_s):
        failed = ""
    return Verdict(mutant, failed, len(tests))


def _first_failure(copy: Path, tests: Sequence[str], limit_s: float) -> str:
    """The id of the first test that fails, or of the file that cannot be imported; "" if all pass."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=no", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return HANGS
    if done.returncode in (0, 5):
        return ""
    # Ids of parameters may have blanks. The message follows.
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    return found[1] if found else tests[0]


def copy_tree(to: Path) -> Path:
    """A copy of the tree without what is built or installed."""
    for folder in COPIED:
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, to / path.name)
    return to


def judged(mutants: Sequence[Mutant], limit_s: float, processes: int) -> list[Verdict]:
    """The verdicts, in the order of the mutants; each process works in a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="gleaner-mutants-") as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(processes):
            free.put(copy_tree(Path(folder, str(number))))

        def one(mutant: Mutant) -> Verdict:
            copy = free.get()
            try:
                verdict = judge(copy, mutant, limit_s)
            finally:
                free.put(copy)
            word = verdict.noticed_by or "LIVES"
            print(f"{mutant.path}:{mutant.line}: {mutant.after.strip()}: {word}", file=sys.stderr, flush=True)
            return verdict

        with ThreadPoolExecutor(processes) as pool:
            return list(pool.map(one, mutants))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mutants", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0, help="limit of one run of a module's tests")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    verdicts = judged(draw(ROOT, options.mutants, options.seed), options.minutes * 60, options.processes)
    rows = [
        {
            "place": f"{verdict.mutant.path}:{verdict.mutant.line}",
            "before": verdict.mutant.before.strip(),
            "after": verdict.mutant.after.strip(),
            "files": verdict.files,
            "noticed by": verdict.noticed_by or "LIVES",
        }
        for verdict in verdicts
    ]
    share = sum(bool(verdict.noticed_by) for verdict in verdicts) / len(verdicts)
    targets = [Target("share_noticed", share, f">= {NOTICED_MIN}")]
    notes = {"seed": options.seed, "mutants": options.mutants}
    finish("mutants", rows, targets, as_json=options.json, notes=notes)


if __name__ == "__main__":
    main()
