"""The Deck of a train task while it runs, as its container stores it."""

import pytest

from tasks.train import train
from tasks.train_shared import train_shared
from tests.processes import LIMIT_S, container, wait_until
from tests.small_run import OWN_REWARD, config, plan_iteration, roll_out


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


def test_train_tasks_have_a_deck_of_their_own_alone():
    for task in (train, train_shared):
        assert task.enable_deck
        assert task.deck_fields == []
