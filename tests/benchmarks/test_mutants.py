"""The breaks that the mutation check draws, and its verdict on small trees."""

from pathlib import Path

import pytest

from benchmarks.mutants import ROOT, Mutant, draw, judge, mapped_tests, mutants_of

SOURCE = '''"""A module."""

LIMIT = 3


def is_full(count: int, limit: int = LIMIT) -> bool:
    """Whether count reaches limit."""
    if count < 0:
        raise ValueError(f"count: value {count}; allowed: at least {0 + 0}")
    return count >= limit


def rest(count: int, limit: int) -> int:
    assert limit > 0
    log.info("looking", 1)
    return max(limit - count, 0)
'''


def after(source: str) -> list[str]:
    return [mutant.after.strip() for mutant in mutants_of("storage/a.py", source)]


def test_each_break_changes_one_operator_word_or_call_of_a_line():
    assert after(SOURCE) == [
        "if count < 1:",
        "if count <= 0:",
        "if not (count < 0):",
        "return count > limit",
        "return max(limit + count, 0)",
        "return max(limit - count, 1)",
        "return min(limit - count, 0)",
    ]


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("return (a) and (b)", "return (a) or (b)"),
        ("return not a", "return a"),
        ("return 'ü' + a", "return 'ü' - a"),
        ("return a is not b", "return a is b"),
        ("return a not in b", "return a in b"),
        ("return f(True)", "return f(False)"),
        ("a.close()", "pass"),
        ("return a // b", None),
    ],
)
def test_operators(line: str, broken: str | None):
    assert after(f"def f(a, b):\n    {line}\n") == ([] if broken is None else [broken])


def test_the_same_seed_draws_the_same_breaks_of_the_product():
    drawn = draw(ROOT, 20, seed=1)
    assert drawn == draw(ROOT, 20, seed=1) != draw(ROOT, 20, seed=2)
    assert len({mutant.path for mutant in drawn}) > 5
    for mutant in drawn:
        compile(broken_text(mutant), mutant.path, "exec")


def broken_text(mutant: Mutant) -> str:
    lines = (ROOT / mutant.path).read_text(encoding="utf-8").splitlines()
    assert lines[mutant.line - 1] == mutant.before
    lines[mutant.line - 1] = mutant.after
    return "\n".join(lines)


def test_a_module_is_tried_by_its_mirrors_first():
    chosen = mapped_tests(ROOT, "tasks/crew_model/rebalance.py")
    assert chosen[0] == "tests/tasks/crew_model/test_rebalance.py"
    assert all(Path(ROOT, name).exists() for name in chosen)


@pytest.mark.slow
def test_a_break_is_noticed_by_a_test_that_looks_and_lives_without_one(tmp_path: Path):
    (tmp_path / "storage").mkdir()
    (tmp_path / "tests/storage").mkdir(parents=True)
    (tmp_path / "storage/a.py").write_text("def double(n):\n    return n * 2\n\n\ndef unseen(n):\n    return n + 1\n")
    (tmp_path / "tests/storage/test_a.py").write_text(
        "import pytest\nfrom storage.a import double\n\n\n@pytest.mark.parametrize('n', [3], ids=['two words'])\n"
        "def test_double(n):\n    assert double(n) == 6\n"
    )
    [product, *_] = [m for m in mutants_of("storage/a.py", (tmp_path / "storage/a.py").read_text()) if "/" in m.after]
    [added] = [m for m in mutants_of("storage/a.py", (tmp_path / "storage/a.py").read_text()) if "n - 1" in m.after]
    noticed = judge(tmp_path, product, limit_s=120.0)
    assert (noticed.noticed_by, noticed.files) == ("tests/storage/test_a.py::test_double[two words]", 1)
    assert judge(tmp_path, added, limit_s=120.0).noticed_by == ""
    assert (tmp_path / "storage/a.py").read_text().count("n * 2") == 1


@pytest.mark.slow
def test_a_test_that_fails_without_the_break_too_notices_nothing(tmp_path: Path):
    (tmp_path / "storage").mkdir()
    (tmp_path / "tests/storage").mkdir(parents=True)
    (tmp_path / "storage/a.py").write_text("def double(n):\n    return n * 2\n")
    (tmp_path / "tests/storage/test_a.py").write_text("def test_fails():\n    assert False\n")
    [mutant, *_] = mutants_of("storage/a.py", (tmp_path / "storage/a.py").read_text())
    assert judge(tmp_path, mutant, limit_s=120.0).noticed_by == ""
