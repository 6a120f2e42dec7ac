"""The benchmark of the page: what it writes is a run, and it finds a page that is slow."""

import pytest

from benchmarks.view import GENERATIONS, measure_page, write_run
from storage.records.run import read_plan
from storage.stores.memory import MemoryStore
from tasks.viewing.response_index import read_index
from tasks.viewing.run_reader import RunReader
from tests.browser import chromium
from tests.served_page import served

RESPONSES = 100 * GENERATIONS
# Each change of the page takes so long.
SLOW_MS = 300
PLANTED = f"""const change = Element.prototype.replaceChildren;
Element.prototype.replaceChildren = function (...children) {{
  const begun = performance.now();
  while (performance.now() - begun < {SLOW_MS});
  return change.apply(this, children);
}};"""


def test_the_run_has_the_responses_that_it_says():
    store = MemoryStore("benchmark")
    tokens = write_run(store, RESPONSES)
    index = read_index(store, read_plan(store, 0))
    assert sum(index.lengths) == tokens
    assert index.states == ["trained"] * RESPONSES
    assert sum(stretches == 2 for stretches in index.stretches) == RESPONSES // 100
    view = RunReader(store).iteration(0).view(0, with_advantage=False)
    assert [stretch.tokens for stretch in view.stretches] == [
        index.lengths[0] // 2,
        index.lengths[0] - index.lengths[0] // 2,
    ]


@pytest.mark.slow
def test_a_page_that_changes_slowly_is_found():
    store = MemoryStore("benchmark")
    write_run(store, RESPONSES)
    with chromium() as browser, served(store) as server:
        page = browser.new_page()
        page.add_init_script(PLANTED)
        slow = measure_page(page, server.address)
        assert slow["slowest filter"] >= SLOW_MS
        assert slow["first rows"] >= SLOW_MS
        assert set(slow) == set(measure_page(browser.new_page(), server.address))
