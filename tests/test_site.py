"""The guide as a site: it builds without a warning, and a link that leads nowhere is one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def built(folder: Path, **changed_pages: str) -> subprocess.CompletedProcess[str]:
    """The site of a copy of the pages, laid out as `make docs` does; `changed_pages` are appended to, by stem."""
    pages = folder / "pages"
    for source in [*ROOT.glob("*.md"), ROOT / "docs", ROOT / "examples"]:
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        pages.mkdir(exist_ok=True)
        copy(source, pages / source.name)
    for stem, text in changed_pages.items():
        [page] = pages.rglob(f"{stem}.md")
        page.write_text(page.read_text(encoding="utf-8") + text, encoding="utf-8")
    config = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": str(pages), "site_dir": str(folder / "site")}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(folder / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def test_the_site_builds_with_all_pages_and_a_search(tmp_path):
    done = built(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    guide = {page.stem for page in (ROOT / "docs" / "guide").glob("*.md")}
    assert {page.stem for page in (site / "docs" / "guide").glob("*.html")} == guide
    assert (site / "index.html").exists()
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    front = (site / "index.html").read_text(encoding="utf-8")
    assert all(f"docs/guide/{stem}.html" in front for stem in guide), "a page is missing in mkdocs.yml's nav"


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    done = built(tmp_path, first_run="\nSee [this](nowhere.md).\n")
    assert done.returncode != 0
    assert "nowhere.md" in done.stdout + done.stderr
