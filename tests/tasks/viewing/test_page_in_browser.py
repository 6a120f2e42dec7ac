"""The page in headless Chromium: load, filter, sort, open, keyboard, narrow and dark, served and from a file."""

import os
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from storage.clock import ManualClock
from tasks.viewing.page_file import write_page
from tasks.viewing.run_reader import RunReader
from tests.browser import chromium, opened
from tests.served_page import served
from tests.viewed_run import HOSTILE, write_viewed_run

pytestmark = pytest.mark.slow

AXE = os.environ.get("AXE_CORE")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_viewed_run(str(tmp_path_factory.mktemp("page") / "run"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module", params=["served", "file"])
def address(request, run, browser, tmp_path_factory):
    """The page from a server, and as a file."""
    with ExitStack() as stack:
        if request.param == "served":
            yield stack.enter_context(served(run)).address
        else:
            file = tmp_path_factory.mktemp("file") / "run.html"
            write_page(RunReader(run), file, ManualClock())
            yield file.as_uri()


def rows(page):
    """The cells of the table of responses, row by row."""
    return page.eval_on_selector_all(
        "#responses tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )


def titles(page):
    return page.locator("#responses th").all_inner_texts()


def choose(page, iteration):
    page.fill("input[name=iterations]", iteration)
    page.press("input[name=iterations]", "Enter")


def until(page, is_so):
    """Wait until it is so; the page's policy does not let playwright evaluate conditions itself."""
    for _ in range(600):
        if is_so():
            return
        page.wait_for_timeout(100)
    pytest.fail("it did not become so within 60 s")


def test_the_newest_iteration_is_shown_first(browser, address):
    with opened(browser, address) as page:
        page.wait_for_selector("#responses tbody tr")
        assert page.inner_text("#count") == "4 of 4 responses of iteration 2 (the newest, under way)"
        assert [row[0] for row in rows(page)] == ["0", "1", "2", "3"]
        assert "running" in rows(page)[0]
        assert page.locator("#charts svg").count() == 6
        assert page.inner_text("#iterations tbody tr:last-child").split()[:2] == ["0", "0.375"]
        assert "98 iterations" in page.inner_text("#facts")


def test_responses_are_filtered_and_sorted(browser, address):
    with opened(browser, address) as page:
        page.wait_for_selector("#responses tbody tr")
        choose(page, "0:2")
        until(page, lambda: page.inner_text("#count") == "8 of 8 responses of iterations 0 to 1")
        assert [row[:2] for row in rows(page)] == [[n, r] for n in "01" for r in "0123"]
        page.click("#more-filters summary")
        page.fill("input[name=rewardMin]", "0.5")
        assert page.inner_text("#count") == "4 of 8 responses of iterations 0 to 1"
        page.select_option("select[name=sort]", label="best first")
        assert [row[:2] for row in rows(page)] == [["1", "3"], ["0", "3"], ["1", "2"], ["0", "2"]]
        page.fill("input[name=rewardMin]", "")
        page.check("input[name=resumed]")
        assert [row[:2] for row in rows(page)] == [["1", "0"], ["0", "0"]]
        page.uncheck("input[name=resumed]")
        page.fill("input[name=prompt]", "2+2")
        page.check("input[name=truncated]")
        assert [row[:2] for row in rows(page)] == [["1", "3"], ["0", "3"]]
        page.fill("input[name=slot]", "0")
        assert page.inner_text("#count") == "0 of 8 responses of iterations 0 to 1"


def test_prompt_completion_and_reward_stand_in_one_row(browser, address):
    with opened(browser, address) as page:
        page.wait_for_selector("#responses tbody tr")
        choose(page, "0")
        until(page, lambda: all(row[2] for row in rows(page)) and rows(page)[0][4] != "")
        assert titles(page)[:4] == ["response", "prompt", "completion", "reward"]
        read = [row[:4] for row in rows(page)]
        page.click("#responses tbody button")
        page.wait_for_selector("dialog[open] .prose")
        [text] = page.evaluate("ask('texts/0/0')")
        assert read[0] == ["0", "1+1=", text, "0"]
        assert text == page.evaluate(
            "ask('responses/0/0').then(view => view.stretches.map(each => each.text).join(''))"
        )


@pytest.mark.parametrize(("order", "best"), [("best first", "3"), ("worst first", "0"), ("longest first", "0")])
def test_the_best_the_worst_and_the_longest_come_first_by_choice(browser, address, order, best):
    with opened(browser, address) as page:
        page.wait_for_selector("#responses tbody tr")
        choose(page, "1")
        until(page, lambda: "iteration 1" in page.inner_text("#count"))
        page.select_option("select[name=sort]", label=order)
        assert rows(page)[0][0] == best
        until(page, lambda: all(row[2] for row in rows(page)))


def test_on_a_telephone_the_text_of_a_response_is_on_the_first_screen(browser, address):
    with opened(browser, address, viewport={"width": 400, "height": 800}) as page:
        page.wait_for_selector("#responses tbody tr")
        until(page, lambda: all(row[2] for row in rows(page)))
        text = page.locator("#responses td.completion").first.bounding_box()
        assert text["y"] + text["height"] < 400
        assert text["width"] > 340
        assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_a_response_is_opened_and_left_by_the_keyboard(browser, address):
    with opened(browser, address) as page:
        page.wait_for_selector("#responses tbody tr")
        choose(page, "0")
        # The advantages come after the rows.
        until(page, lambda: rows(page)[0][titles(page).index("advantage")] != "")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.name") == "prompt"
        page.focus("#responses tbody button")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog[open] .stretch.killed")
        assert "killed at token 3" in page.inner_text("dialog .stretch.killed")
        assert "Advantage -0.7" in page.inner_text("dialog")
        assert "style not applicable" in page.inner_text("dialog")
        page.keyboard.press("j")
        until(page, lambda: page.inner_text("#detail-title").endswith("response 1"))
        page.keyboard.press("k")
        until(page, lambda: page.inner_text("#detail-title").endswith("response 0"))
        page.keyboard.press("Escape")
        until(page, lambda: not page.evaluate("document.getElementById('detail').open"))
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Open response 0 of iteration 0"


def test_tokens_the_group_and_the_prompt_are_shown_on_demand(browser, address):
    with opened(browser, address) as page:
        page.wait_for_selector("#responses tbody tr")
        choose(page, "0")
        page.wait_for_selector("button[aria-label='Open response 0 of iteration 0']")
        page.click("button[aria-label='Open response 0 of iteration 0']")
        text = page.wait_for_selector("dialog .prose >> nth=1").inner_text()
        page.click("text=Colour tokens by log-prob")
        page.wait_for_selector("dialog .prose span[title]")
        titles = page.eval_on_selector_all("dialog .prose span[title]", "nodes => nodes.map(node => node.title)")
        assert titles == ["log-prob -1.5000, probability 0.2231"] * 5
        assert page.inner_text("dialog #text .prose") == text
        page.click("text=Its text")
        assert page.locator("dialog .prose span[title]").count() == 0
        assert page.inner_text("dialog #text .prose") == text
        page.click("text=Its group side by side")
        page.wait_for_selector("dialog .beside")
        assert page.eval_on_selector_all("dialog .beside h3", "all => all.map(each => each.textContent)") == [
            "Response 0",
            "Response 1",
        ]
        page.click("text=Its prompt in other iterations")
        page.wait_for_selector("dialog li")
        page.click("dialog li button >> nth=1")
        until(page, lambda: page.inner_text("#detail-title").startswith("Iteration 1"))


def test_markup_of_prompts_is_text(browser, address):
    with opened(browser, address) as page:
        page.wait_for_selector("#responses tbody tr")
        assert HOSTILE in page.inner_text("#responses")
        page.click("button[aria-label='Open response 2 of iteration 2']")
        page.wait_for_selector("dialog[open] .prose")
        page.click("dialog summary")
        assert HOSTILE in page.inner_text("dialog")
        assert page.evaluate("window.harmed") is None
        assert page.locator("dialog img, dialog script, #responses img").count() == 0


@pytest.mark.parametrize(("width", "scheme"), [(420, "light"), (420, "dark"), (1280, "dark"), (1280, "light")])
def test_it_fits_narrow_screens_in_light_and_dark(browser, address, width, scheme, tmp_path):
    with opened(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        page.wait_for_selector("#responses tbody tr")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(246, 248, 250)" if scheme == "light" else "rgb(13, 17, 23)")
        card = page.evaluate("getComputedStyle(document.querySelector('#charts rect')).fill")
        assert card == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 27, 34)")
        page.click("#responses tbody button")
        page.wait_for_selector("dialog[open] .prose")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        complaints(page)
        page.click("text=Colour tokens by log-prob")
        page.wait_for_selector("dialog .prose span[title]")
        complaints(page)
        assert strongest_contrast(page) >= 4.5
        page.click("text=Its group side by side")
        page.wait_for_selector("dialog .beside")
        complaints(page)


def complaints(page):
    """Fails if axe-core finds a violation, where it is installed."""
    if AXE is None:
        return
    page.evaluate(Path(AXE).read_text(encoding="utf-8"))
    found = page.evaluate("axe.run().then(result => result.violations.map(each => [each.id, each.nodes[0].html]))")
    assert found == []


def strongest_contrast(page):
    """Of the text of a token to the strongest colour behind it (WCAG 2.2, contrast ratio); axe skips single letters."""
    colours = page.evaluate("""() => {
      const token = document.querySelector("dialog .prose span[title]"), style = getComputedStyle(token);
      token.style.setProperty("--share", 1);
      return [style.color, style.backgroundColor, getComputedStyle(token.parentElement).backgroundColor];
    }""")
    ink, (*over, alpha), paper = ([float(part) for part in re.findall(r"[\d.]+", colour)] for colour in colours)
    behind = [alpha * one + (1 - alpha) * other for one, other in zip(over, paper, strict=True)]
    low, high = sorted(luminance(colour) for colour in (ink, behind))
    return (high + 0.05) / (low + 0.05)


def luminance(colour):
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (c / 255 for c in colour)
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.skipif(AXE is None, reason="no axe-core: name its axe.min.js in AXE_CORE")
def test_a_violation_is_complained_of(browser, address):
    with opened(browser, address) as page:
        page.wait_for_selector("#responses tbody tr")
        page.evaluate("document.querySelector('main').append(document.createElement('img'))")
        with pytest.raises(AssertionError, match="image-alt"):
            complaints(page)


def test_an_answer_that_comes_late_does_not_replace_what_was_chosen_since(browser, run):
    held = []

    def hold(route):
        held.append(route)

    with served(run) as server, opened(browser, server.address) as page:
        page.wait_for_selector("#responses tbody tr")
        page.route("**/data/iterations/0", hold)
        choose(page, "0")
        until(page, lambda: held)
        choose(page, "1")
        page.wait_for_selector("button[aria-label='Open response 0 of iteration 1']")
        with page.expect_response("**/data/iterations/0"):
            held[0].continue_()
        page.wait_for_timeout(500)
        assert page.locator("button[aria-label='Open response 0 of iteration 1']").count() == 1


def test_rewards_have_any_name_that_a_configuration_allows(browser, run):
    """Also those that every JavaScript object knows as something else."""
    names = '{"constructor": [0.5], "__proto__": [0.25]}'
    lists = "lengths: [1], stretches: [1], truncated: [false], rewards: [1], slots: [0]"
    block = f"{{iteration: 0, num_generations: 1, states: ['trained'], prompts: [{{id: 'a', text: ''}}], {lists}"
    shown = f"joined([{block}, rewards_by_name: JSON.parse('{names}')}}]).named"
    with served(run) as server, opened(browser, server.address) as page:
        found = page.evaluate(f"Object.entries({shown}).map(([name, values]) => [name, values[0]])")
    assert found == [["constructor", 0.5], ["__proto__", 0.25]]


def test_a_slot_is_shown_as_a_name(browser, address):
    with opened(browser, address) as page:
        page.wait_for_selector("#responses tbody tr")
        page.evaluate("rows.slot[0] = 1234; rows.slot[1] = NaN; rows.length[0] = 5678; drawRows()")
        title = titles(page).index("slot")
        assert [row[title] for row in rows(page)[:2]] == ["1234", ""]
        assert "5,678" in " ".join(rows(page)[0])


def test_a_wrong_range_is_said_on_the_page(browser, address):
    with opened(browser, address) as page:
        page.wait_for_selector("#responses tbody tr")
        choose(page, "7")
        page.wait_for_selector("#problem:not([hidden])")
        assert page.inner_text("#problem") == "iterations: value 7; allowed: the run has 0 to 2"
        choose(page, "1")
        page.wait_for_selector("#problem", state="hidden")
