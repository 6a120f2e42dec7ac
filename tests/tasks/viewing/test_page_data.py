"""The texts of a page of the table of responses: in order, short, and read together."""

from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.records import layout
from storage.records.records import PlanRecord, read
from tasks.viewing.page_data import TEXT_CHARACTERS, excerpt, page_data
from tasks.viewing.run_reader import RunReader
from tests.viewed_run import write_viewed_run
from tests.watched_run import Counted

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_viewed_run(str(tmp_path_factory.mktemp("data") / "run"), tmp_path_factory.mktemp("model"))


def text_of(view):
    return "".join(stretch.text for stretch in view.stretches)


@pytest.mark.parametrize("iteration", [0, 1, 2])
def test_texts_are_those_of_the_responses_in_the_order_asked_for(run, iteration):
    reader = RunReader(run)
    texts = page_data(reader, ManualClock(), f"texts/{iteration}/3/0/2")
    assert texts == [text_of(reader.iteration(iteration).view(number)) for number in (3, 0, 2)]
    with reader.iteration(iteration).read_together(range(4)):
        assert page_data(reader, ManualClock(), f"texts/{iteration}/3/0/2") == texts
        # The block goes on after the one inside it.
        assert text_of(reader.iteration(iteration).view(3)) == texts[0]


def test_many_texts_take_hardly_more_requests_than_one(run):
    store = Counted()
    for key in run.list(""):
        store.put(key, run.get(key))

    def requests(path):
        reader = RunReader(store)
        page_data(reader, ManualClock(), "iterations/1")
        store.asked.clear()
        page_data(reader, ManualClock(), path)
        return len(store.asked)

    assert read(store, PlanRecord, layout.plan(1)).num_responses == 4
    assert requests("texts/1/0/1/2/3") <= requests("texts/1/0") + 1


def test_of_a_long_text_the_beginning_and_more_of_the_end_are_shown(run):
    view = RunReader(run).iteration(0).view(3)
    long = "a" * 5000 + "\x1b" + "z" * 5000
    [stretch] = view.stretches
    cut = excerpt(replace(view, stretches=(replace(stretch, text=long),)))
    head, _, tail = cut.partition(f" [... {len(long) - TEXT_CHARACTERS:,} characters ...] ")
    assert set(head) == {"a"}
    assert set(tail) == {"z"}
    assert len(head) < len(tail)
    assert len(head) + len(tail) == TEXT_CHARACTERS
    assert excerpt(replace(view, stretches=(replace(stretch, text="\x1b[31m"),))) == "\\x1b[31m"
    assert excerpt(replace(view, has_text=False)) == "(the run holds no tokenizer)"
