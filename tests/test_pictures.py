"""The pictures of the guide in docs/images: taken here of the page, the Deck and the notebook, in headless Chromium.

Without more, they are taken of a small run, and looked at. To make them anew, name a run of `make demo`:

    PICTURED_RUN=runs/demo-... python -m pytest tests/test_pictures.py

writes what it takes of that run to docs/images. It needs the extra `browser`.
"""

import io
import os
import re
import shutil
from html import escape
from pathlib import Path

import pytest

from storage.stores.connect import connect
from tasks.concluding.iteration import commit_and_report
from tests.browser import chromium, opened
from tests.served_page import served
from tests.small_run import config, plan_iteration, roll_out, train_small

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
# Each with the document that shows it first.
PICTURES = {
    "page_wide.png": ROOT / "README.md",
    "page_narrow.png": ROOT / "docs" / "guide" / "watching.md",
    "page_dark.png": ROOT / "docs" / "guide" / "watching.md",
    "deck_overview.png": ROOT / "docs" / "guide" / "watching.md",
    "deck_slots.png": ROOT / "docs" / "guide" / "watching.md",
    "notebook.png": ROOT / "docs" / "guide" / "watching.md",
}
BYTES_MAX = 200 * 1024
PICTURED = os.environ.get("PICTURED_RUN")
COLOURS = 256


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory, model):
    """The directory of a run with Decks."""
    if PICTURED is not None:
        return Path(PICTURED).resolve()
    folder = tmp_path_factory.mktemp("pictured") / "run"
    for iteration in range(2):
        reference = plan_iteration(config(str(folder), model))
        roll_out(str(folder), iteration)
        train_small(str(folder), iteration)
        commit_and_report(reference, last=False)
    return folder


def take(page, name, folder, **options):
    """Take the picture; it is written to docs/images if it is of the run that was named, and else to `folder`."""
    image = pytest.importorskip("PIL.Image")
    taken = image.open(io.BytesIO(page.screenshot(**options))).convert("RGB")
    body = io.BytesIO()
    taken.quantize(COLOURS).save(body, "png", optimize=True)
    assert len(body.getvalue()) <= BYTES_MAX
    assert len(taken.getcolors(taken.width * taken.height)) > COLOURS // 8, "nearly nothing is to be seen"
    ((IMAGES if PICTURED else folder) / name).write_bytes(body.getvalue())
    return taken


def most_lost(page):
    """The iteration that lost the most processes, or the newest of them."""
    rows = page.eval_on_selector_all(
        "#iterations tr", "rows => rows.map(row => [...row.cells].map(c => c.textContent))"
    )
    [at] = [at for at, title in enumerate(rows[0]) if title == "lost"]
    return max(rows[1:], key=lambda row: float(row[at] or 0))[0]


def choose_resumed(page):
    """Show the responses of the iteration that lost the most; if any was resumed, only those."""
    page.wait_for_selector("#responses tbody tr")
    page.fill("input[name=iterations]", most_lost(page))
    page.press("input[name=iterations]", "Enter")
    # The advantages come last.
    page.wait_for_selector("#responses tbody td:nth-child(4):not(:empty)")
    page.click("#more-filters summary")
    page.check("input[name=resumed]")
    if page.inner_text("#count").startswith("0 of"):
        page.uncheck("input[name=resumed]")
    page.select_option("select[name=sort]", label="lowest advantage first")
    page.evaluate("document.getElementById('h-responses').scrollIntoView(); document.activeElement.blur()")


@pytest.mark.slow
def test_the_page_is_pictured_wide(browser, run, tmp_path):
    with (
        served(connect(str(run))) as server,
        opened(browser, server.address, viewport={"width": 1280, "height": 1040}, color_scheme="light") as page,
    ):
        page.wait_for_selector("#responses tbody tr")
        assert page.locator("#charts polyline").count() >= 6
        assert take(page, "page_wide.png", tmp_path).size == (1280, 1040)


@pytest.mark.slow
def test_the_page_is_pictured_narrow(browser, run, tmp_path):
    with (
        served(connect(str(run))) as server,
        opened(browser, server.address, viewport={"width": 420, "height": 900}, color_scheme="light") as page,
    ):
        choose_resumed(page)
        assert take(page, "page_narrow.png", tmp_path).size == (420, 900)


@pytest.mark.slow
def test_the_page_is_pictured_in_the_dark_with_an_open_response(browser, run, tmp_path):
    with (
        served(connect(str(run))) as server,
        opened(browser, server.address, viewport={"width": 1280, "height": 520}, color_scheme="dark") as page,
    ):
        choose_resumed(page)
        page.click("#responses tbody button")
        page.wait_for_selector("dialog[open] .stretch")
        page.click("text=Colour tokens by log-prob")
        page.wait_for_selector("dialog .prose span[title]")
        taken = take(page, "page_dark.png", tmp_path)
        assert max(taken.getpixel((640, 510))) < 64


@pytest.mark.slow
def test_the_deck_is_pictured_as_flytes_console_shows_it(browser, run, tmp_path):
    """Flyte's console shows the page that flytekit makes of the tabs, in a frame; the page asks for fonts elsewhere."""
    decks = sorted(run.glob("iterations/*/deck.html"))
    reports = [(path.parent / "report.json").read_text(encoding="utf-8") for path in decks]
    deck = decks[max(range(len(decks)), key=lambda at: len(re.findall(r'"state": ?"lost"', reports[at])))]
    (tmp_path / "console.html").write_text(in_console(browser, deck), encoding="utf-8")
    with browser.new_context(viewport={"width": 1280, "height": 1040}, offline=True) as made:
        page = made.new_page()
        page.goto((tmp_path / "console.html").as_uri())
        assert page.is_visible("text=weight version")
        take(page, "deck_overview.png", tmp_path)
        page.click("#flyte-frame-tabs >> text=Slots")
        page.wait_for_selector("#flyte-frame-container > div.active svg >> nth=0")
        page.set_viewport_size({"width": 1280, "height": 460})
        take(page, "deck_slots.png", tmp_path)


def in_console(browser, deck):
    """The document that flytekit makes of the tabs of a stored Deck."""
    from flytekit.deck.deck import get_deck_template  # noqa: PLC0415 - imports all of flytekit

    with opened(browser, deck.as_uri()) as page:
        tabs = page.eval_on_selector_all(
            "main > section", "all => all.map(each => [each.children[0].textContent, each.children[1].outerHTML])"
        )
    assert tabs[0][0] == "Overview"
    links = "".join(f'<li onclick="handleLinkClick(this)">{escape(name)}</li>' for name, _ in tabs)
    return get_deck_template().substitute(NAV_HTML=links, BODY_HTML="".join(f"<div>{tab}</div>" for _, tab in tabs))


@pytest.mark.slow
def test_the_notebook_is_pictured_with_what_its_cells_show(browser, run, tmp_path):
    nbformat, exporters = pytest.importorskip("nbformat"), pytest.importorskip("nbconvert.exporters")
    execution = pytest.importorskip("nbconvert.preprocessors").ExecutePreprocessor
    pytest.importorskip("ipykernel")
    (tmp_path / "runs").mkdir()
    (tmp_path / "examples").mkdir()
    shutil.copytree(run, tmp_path / "runs" / "demo")
    notebook = nbformat.read(ROOT / "examples" / "read_a_run.ipynb", as_version=4)
    execution(timeout=300, startup_timeout=300, kernel_name="python3").preprocess(
        notebook, {"metadata": {"path": str(tmp_path / "examples")}}
    )
    for cell in notebook.cells:
        # tqdm warns, with paths of this machine, that Jupyter's widgets are not installed.
        cell["outputs"] = [shown for shown in cell.get("outputs", []) if shown.get("name") != "stderr"]
    exporter = exporters.HTMLExporter(template_name="classic", mathjax_url="", require_js_url="")
    (tmp_path / "notebook.html").write_text(exporter.from_notebook_node(notebook)[0], encoding="utf-8")
    with browser.new_context(viewport={"width": 1000, "height": 1140}, offline=True) as made:
        page = made.new_page()
        page.goto((tmp_path / "notebook.html").as_uri())
        assert page.locator("svg polyline").count() > 0
        assert "no data" not in page.inner_text("body")
        # Above it a cell shows the directory of this test.
        page.evaluate("document.getElementById('Metrics').scrollIntoView()")
        take(page, "notebook.png", tmp_path)


def test_every_picture_is_committed_and_shown():
    assert {path.name for path in IMAGES.glob("*.png")} == set(PICTURES)
    for name, document in PICTURES.items():
        body = (IMAGES / name).read_bytes()
        assert body.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(body) <= BYTES_MAX
        relative = os.path.relpath(IMAGES / name, document.parent)
        assert re.search(rf"!\[[^\]]{{20,}}\]\({re.escape(relative)}\)", document.read_text(encoding="utf-8")), name
