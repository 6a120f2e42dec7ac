"""The page of runs that are too long, hostile, or gone, in headless Chromium: it says so, and interprets nothing."""

import shutil
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from examples.warm_start import build_tokenizer
from resources.local_http import LOOPBACK
from storage.digests import digest_of
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.prompt_table import PromptRow, encode_prompts
from storage.records.records import ReportRecord
from storage.stores.memory import MemoryStore
from tasks.reporting.metrics_lines import write_metrics
from tests.browser import chromium, opened
from tests.committed_runs import begin
from tests.journals import Incarnation, a_plan
from tests.served_page import served
from tests.viewed_run import CONFIG, write_viewed_run

pytestmark = pytest.mark.slow

LONG = 200_000
ITERATIONS = 10_000
# Colours of a terminal, a bell, and marks that turn the text after them around.
CONTROLS = "\x1b[31mred\x07 \u202egnp.exe\u2066"
WRITTEN_OUT = "\\x1b[31mred\\x07 \\u202egnp.exe\\u2066"


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """A run under way: response 0 has 200,000 tokens, and its prompt, and the prompt's id, have control characters."""
    folder = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    store = MemoryStore("strange")
    begin(store, {path.name: path.read_bytes() for path in folder.iterdir()}, CONFIG)
    prompt = PromptRow(CONTROLS, (5, 6), CONTROLS, {"answer": CONTROLS})
    body = encode_prompts([prompt])
    key = layout.prompts(0, digest_of(body))
    store.put(key, body)
    plan = a_plan(groups=1, generations=2, prompts_key=key, config=CONFIG)
    plan = replace(plan, sampling=replace(plan.sampling, max_completion_length=LONG))
    records.commit(store, layout.plan(0), plan)
    member = Incarnation(store, plan, 0, f"00000-{'a' * 16}")
    member.write(0, [3 + at % 10 for at in range(LONG)], Finish.LENGTH)
    member.write(1, [3, 4], Finish.STOP)
    return store


@contextmanager
def complaining(browser, address):
    """A page whose requests may fail; an error of its script fails the test."""
    with browser.new_context() as made:
        page, problems = made.new_page(), []
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address)
        yield page
        assert problems == []


def test_a_response_of_200_000_tokens_is_shown_and_coloured_piece_by_piece(browser, strange):
    with served(strange) as server, opened(browser, server.address) as page:
        page.wait_for_selector("#responses tbody tr")
        page.click("#responses tbody button")
        page.wait_for_selector("dialog[open] .stretch")
        assert "200,000 tokens" in page.inner_text("dialog")
        assert len(page.evaluate("document.querySelector('#text .prose').textContent")) > LONG
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for coloured in (4096, 8192):
            page.click("text=/Colour (tokens by|the next)/ >> nth=-1")
            page.wait_for_selector(f"text=Colour the next of {LONG - coloured:,} tokens")
            assert page.locator("dialog .prose span[title]").count() == coloured


def test_control_characters_are_written_out(browser, strange):
    with served(strange) as server, opened(browser, server.address) as page:
        page.wait_for_selector("#responses tbody tr")
        assert WRITTEN_OUT in page.inner_text("#responses")
        page.click("#responses tbody button >> nth=1")
        page.wait_for_selector("dialog[open] .stretch")
        page.click("dialog summary")
        assert page.inner_text("dialog details pre").count(WRITTEN_OUT.replace("\\", "\\\\")) == 1
        page.click("text=Its prompt in other iterations")
        page.wait_for_selector("dialog li")
        assert f"Prompt {WRITTEN_OUT} is in this group alone" in page.inner_text("dialog #text h3")
        shown = page.evaluate("document.body.textContent")
        assert not set(shown) & set("\x1b\x07\u202e\u2066")


def test_a_run_of_10_000_iterations_has_a_short_table_until_all_are_asked_for(browser):
    store = MemoryStore("long")
    begin(store, config=CONFIG)
    report = ReportRecord(
        iteration=0,
        weight_version=1,
        next_prompt=0,
        metrics={"reward": 0.5, "completions/mean_length": 3.0, "timing_s/iteration": 1.0},
        rewards=(),
        lengths=(),
        lives=(),
        train_started_at_s=0,
        train_ended_at_s=0,
        created_at_s=0,
    )
    for iteration in range(ITERATIONS):
        records.put(store, layout.report(iteration), replace(report, iteration=iteration, weight_version=iteration + 1))
    write_metrics(store)
    with served(store) as server, complaining(browser, server.address) as page:
        page.wait_for_selector("#iterations tbody tr")
        assert "10,000 iterations" in page.inner_text("#facts")
        assert page.locator("#iterations tbody tr").count() == 30
        assert page.evaluate("document.querySelector('#charts polyline').points.length") <= 400
        page.click("#older")
        assert page.locator("#iterations tbody tr").count() == ITERATIONS


def test_a_run_that_is_deleted_while_its_page_is_open_is_said_and_what_was_loaded_stays(browser, tmp_path):
    (tmp_path / "model").mkdir()
    store = write_viewed_run(str(tmp_path / "run"), tmp_path / "model")
    with served(store) as server, complaining(browser, server.address) as page:
        page.wait_for_selector("#responses tbody tr")
        shutil.rmtree(tmp_path / "run")
        page.fill("input[name=iterations]", "0")
        page.press("input[name=iterations]", "Enter")
        page.wait_for_selector("#problem:not([hidden])")
        assert "has no plan of it" in page.inner_text("#problem")
        assert page.locator("#responses tbody tr").count() == 4
        page.click("#responses tbody button")
        page.wait_for_selector("dialog[open] .problem")
        assert "\n" not in page.inner_text("dialog .problem")


class AnotherPage(BaseHTTPRequestHandler):
    """A page of another server on this machine; Chromium keeps pages from elsewhere away from loopback by itself."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<!doctype html><p>another page</p>")

    def log_message(self, *_):
        pass


@contextmanager
def another_page():
    """The address of another page."""
    with ThreadingHTTPServer((LOOPBACK, 0), AnotherPage) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join(30)


def test_another_page_of_the_same_browser_reads_nothing(browser, tmp_path):
    """It knows the address, and even the token."""
    (tmp_path / "model").mkdir()
    one = write_viewed_run(str(tmp_path / "run"), tmp_path / "model")
    ask = """async address => {
      const found = [];
      for (const options of [{}, {mode: "no-cors"}, {method: "POST"}])
        found.push(await fetch(address, options).then(answer => answer.text(), () => "refused"));
      return found;
    }"""
    with served(one) as server, another_page() as other, browser.new_context() as made:
        page = made.new_page()
        page.goto(other)
        base, _, token = server.address.partition("?")
        for address in (f"{base}data/summary?{token}", f"{base}data/summary", server.address):
            assert all(each in ("refused", "") for each in page.evaluate(ask, address)), address
        page.evaluate(
            """address => new Promise(done => {
              const frame = document.createElement("iframe");
              frame.onload = frame.onerror = () => done();
              frame.src = address;
              document.body.append(frame);
            })""",
            server.address,
        )
        assert page.frames[1].locator("#h-responses").count() == 0
