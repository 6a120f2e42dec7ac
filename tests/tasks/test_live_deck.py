"""The Deck of a train task while it runs, as its container stores it."""

import threading

import pytest
from flytekit import Deck

from storage.clock import ManualClock, SystemClock
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreUnavailable
from tasks.live_deck import publish_looks
from tasks.sampling.session.member import generate_slot
from tasks.train import train
from tasks.train_shared import train_shared
from tests.processes import LIMIT_S, container, wait_until
from tests.small_run import OWN_REWARD, config, memory_store, plan_iteration, roll_out


@pytest.mark.slow
def test_the_console_shows_what_training_waits_for_and_at_the_end_what_was_done(model, tmp_path):
    url = str(tmp_path / "a&b")
    reference = plan_iteration(config(url, model, rewards=OWN_REWARD, trainer={"group_timeout_s": 600.0}))
    page = tmp_path / "container" / "out" / "deck.html"
    with container(train, reference, tmp_path / "container") as process:
        wait_until(page.exists)
        running = page.read_text()
        assert process.poll() is None
        roll_out(url, 0)
        assert process.wait(LIMIT_S) == 0, (tmp_path / "container" / "log").read_text()
    ended = page.read_text()
    assert '<li onclick="handleLinkClick(this)">Live</li>' in running
    assert f"{url}   iteration 0   rollout".replace("&", "&amp;") in running
    assert "the trainer waits for\n  group 0: responses 0 (0 tokens, not claimed)" in running
    assert "reward so far" not in running
    assert "iteration 0   publishing" in ended
    assert "reward so far 0." in ended
    assert "the trainer waits for" not in ended


class Away(MemoryStore):
    """A store that does not answer while it is away."""

    is_away = False

    def get(self, key, start=0, end=None):
        if self.is_away:
            raise StoreUnavailable("no answer")
        return super().get(key, start, end)


class End(threading.Event):
    """The end of a task in which something happens while a look is awaited: at each wait, the next of the events."""

    def __init__(self, clock, events):
        super().__init__()
        self.clock, self.events, self.waits = clock, list(events), []

    def wait(self, timeout=None):
        self.waits.append(timeout)
        self.clock.sleep(timeout)
        self.events.pop(0)()
        if not self.events:
            self.set()
        return self.is_set()


@pytest.fixture
def looked(monkeypatch):
    """looked(url, *events) -> (page, times at which it was published with what it said, waits); the last event ends."""

    def look(url, *events):
        clock, page, published = ManualClock(), Deck("Live"), []
        began_s = clock.monotonic()
        monkeypatch.setattr(Deck, "publish", lambda: published.append((clock.monotonic() - began_s, page.html)))
        ended = End(clock, events)
        publish_looks(url, page, ended, clock)
        return page, published, ended.waits

    return look


def test_a_page_is_published_every_thirty_seconds(model, looked):
    url = "memory://live-deck"
    memory_store("live-deck")
    plan_iteration(config(url, model))

    def generate():
        generate_slot(url, 0, 0, lambda: False, SystemClock())

    page, published, waits = looked(url, lambda: None, generate, lambda: None)
    times, texts = zip(*published, strict=True)
    assert (times, waits) == ((0.0, 30.0, 60.0), [30.0] * 3)
    assert ["responses 6 of 12" in text for text in texts] == [False, False, True]
    for waited, text in zip(("0 s", "30 s", "1 min 00 s"), texts, strict=True):
        assert f"seen for {waited}\n" in text
    assert "seen for 1 min 30 s\n" in page.html


def test_the_last_look_is_kept_for_flyte_and_not_published(model, looked):
    url = "memory://live-deck"
    memory_store("live-deck")
    plan_iteration(config(url, model))
    page, published, _ = looked(url, lambda: roll_out(url, 0))
    [(at_s, text)] = published
    assert at_s == 0.0
    assert "not claimed" in text
    assert "not claimed" not in page.html
    assert "responses 12 of 12" in page.html


def test_a_look_that_fails_disturbs_nothing_and_the_next_one_is_made(model, looked):
    url = "memory://live-deck"
    memory_store("live-deck", Away("live-deck"))
    plan_iteration(config(url, model))
    store = connect(url)
    store.is_away = True

    def come_back():
        store.is_away = False

    _, published, _ = looked(url, come_back, lambda: None)
    assert [at_s for at_s, _ in published] == [30.0]


def test_train_tasks_have_a_deck_of_their_own_alone():
    for task in (train, train_shared):
        assert task.enable_deck
        assert task.deck_fields == []
