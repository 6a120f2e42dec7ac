"""Documents and docstrings can be read once: few sentences are full of pronouns, and no page names a day."""

import re
from pathlib import Path

import pytest

from tests.sentences import complaint, decoded_share, of_docstrings, of_folder, of_markdown

ROOT = Path(__file__).parents[1]
PAGES_AT_MOST = 0.05
DOCSTRINGS_AT_MOST = 0.03
PAGES = sorted([*(ROOT / name for name in ("README.md", "ARCHITECTURE.md")), *ROOT.glob("docs/**/*.md")])
PACKAGES = ("storage", "tasks", "resources", "workflows", "workflows_flyte2")
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def dates(text: str) -> list[str]:
    """The days that a page names; what a program printed may have any."""
    return DATE.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_read_once(page: Path) -> None:
    told = complaint(list(of_markdown(page.read_text(encoding="utf-8"), page.name)), PAGES_AT_MOST)
    assert not told, told


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_say_what_is_and_name_no_day(page: Path) -> None:
    assert dates(page.read_text(encoding="utf-8")) == []


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_are_read_once(package: str) -> None:
    told = complaint(list(of_folder(ROOT / package)), DOCSTRINGS_AT_MOST)
    assert not told, told


BAD = "It says which of them it was that the other one took from it."
GOOD = "The claim names the response, the incarnation and the number of the last shard that counts."


def test_a_planted_sentence_is_found_in_a_page_and_a_docstring() -> None:
    [sentence] = of_markdown(f"# Title\n\n- {BAD}\n", "page.md")
    assert sentence.text == BAD
    assert sentence.share > 0.5
    source = f'def taken():\n    """Short.\n\n    {BAD}\n    """\n'
    [sentence] = of_docstrings(source, "storage/claims.py")
    assert sentence.place == "storage/claims.py:taken"
    told = complaint([sentence], 0.03)
    assert told.startswith("100.0% of 1 sentences, allowed: 3%")
    assert BAD in told


def test_a_sentence_of_a_list_is_found_over_its_lines() -> None:
    first, second = BAD.split(" was ")
    text = f"1. Outer:\n    - {first} was\n      {second}\n    {GOOD}\n\n{GOOD}\n"
    assert [sentence.text for sentence in of_markdown(text, "page.md") if sentence.share > 0.2] == [BAD]


def test_a_folder_of_good_docstrings_with_one_bad_is_told(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("".join(f'def f{n}():\n    """{GOOD}"""\n' for n in range(9)), encoding="utf-8")
    (tmp_path / "bad.py").write_text(f'"""{BAD}"""\n', encoding="utf-8")
    found = list(of_folder(tmp_path))
    assert decoded_share(found) == 0.1
    assert complaint(found, 0.1) == ""
    assert f"{tmp_path.name}/bad.py:module: {BAD}" in complaint(found, 0.05)


@pytest.mark.parametrize(
    "text",
    [
        "It is that one.",
        f"```\n{BAD}\n```",
        f"| {BAD} | {BAD} |",
        f"<!-- {BAD} -->",
        f"    {BAD}",
        "The other one reads [the record of the run in the object store](x.md#it-that-those-what-which-one).",
        "The claim names this response:\n- it, that one\n- those\n- which\n- what they are\n- so\n- them",
    ],
)
def test_what_is_short_or_no_sentence_is_not_counted_as_bad(text: str) -> None:
    assert decoded_share(list(of_markdown(text, "page.md"))) == 0


def test_a_day_is_found_outside_code() -> None:
    assert dates("Accepted 2026-11-21.") == ["2026-11-21"]
    assert dates("```\nwritten 2026-11-21\n```") == []
    assert dates("arXiv 2605.20863, version 2026.7.19") == []
