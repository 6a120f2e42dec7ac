"""The Deck's tab with responses: which, their text, and that it never fails a committed iteration."""

import pytest

from storage.records import layout
from storage.records.run import read_plan
from storage.stores.memory import MemoryStore
from tasks.concluding.responses_tab import CHARACTERS_MAX, best_worst_longest, responses_tab
from tasks.reporting.deck import page
from tasks.viewing.response_index import read_index
from tests.committed_runs import begin, plan_iteration
from tests.viewed_run import HOSTILE, write_viewed_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_viewed_run(str(tmp_path_factory.mktemp("tab") / "run"), tmp_path_factory.mktemp("model"))


def test_the_best_the_worst_and_the_longest_are_chosen_once_each(run):
    index = read_index(run, read_plan(run, 0))
    # Response 0 has the lowest reward and is the longest, too.
    assert best_worst_longest(index) == {"Highest reward": 3, "Lowest reward": 0}
    index.lengths[1] = 9
    assert best_worst_longest(index) == {"Highest reward": 3, "Lowest reward": 0, "Longest": 1}
    index.rewards[:] = [None] * 4
    assert best_worst_longest(index) == {"Longest": 1}
    index.states[:] = ["not begun"] * 4
    assert best_worst_longest(index) == {}


@pytest.mark.parametrize("iteration", [0, 1])
def test_they_are_shown_as_text_with_their_kills(run, iteration):
    tab = responses_tab(run, iteration)["Responses"]
    assert "Response 3 of group 1: reward 0.75 (exact 0.75, style 0.5), 1 tokens, length." in tab
    assert (
        "Response 0 of group 0: reward 0 (exact 0, style not applicable), 5 tokens, stop; killed and resumed 1 time."
        in tab
    )
    assert f"gleaner show {run.url} {iteration} 3" in tab
    document = page("Gleaner", {"Responses": tab})
    assert document.count("<h1>") == 1
    assert document.index("<h1>") < document.index("<h2") < document.index("<h3>")


def test_markup_is_text_and_long_texts_are_cut(run, tmp_path):
    (tmp_path / "model").mkdir()
    store = write_viewed_run(str(tmp_path / "run"), tmp_path / "model")
    for key in list(store.list(layout.MODEL)):
        store.delete(key)
    begin(store)  # without a tokenizer, the prompt is shown as it stands in the data
    tab = responses_tab(store, 2)["Responses"]
    assert HOSTILE not in tab
    assert "&lt;img src=x" in tab
    assert "(the run holds no tokenizer)" in tab
    assert CHARACTERS_MAX * 6 < 90_000


def test_what_cannot_be_read_is_left_out(caplog):
    store = MemoryStore("empty")
    begin(store)
    plan_iteration(store, 0)
    assert responses_tab(store, 0) == {}
    assert responses_tab(store, 7) == {}
    assert "the Deck shows no responses" in caplog.text
