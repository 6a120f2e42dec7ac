"""Simulated histories in which each life of a member has a drafter of its own."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from simulation.judge import live_and_judge
from simulation.simulated_history import DRAFTS, Strike, draw_history
from tasks.sampling.engines import scripted_engine
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tests.judged_histories import DEFAULT_SEEDS, drawn
from tests.wrong_verifications import WRONG_VERIFICATIONS


def drafting():
    return drawn(lambda history: history.drafts)


def test_a_quarter_of_the_histories_has_drafts():
    histories = [draw_history(seed) for seed in DEFAULT_SEEDS]
    share = sum(history.drafts for history in histories) / len(histories)
    assert DRAFTS - 0.07 < share < DRAFTS + 0.07
    assert sum(history.drafts and history.stands for history in histories) > 3
    assert sum(history.drafts and history.script is not None for history in histories) > 10


def test_kills_and_other_drafters_change_no_token():
    """Many kills: the next life of the member, or whoever takes its responses, has another drafter."""
    kills = tuple(Strike(at_s=at_s, kind="kill") for at_s in range(5, 100, 10))
    outcomes = [live_and_judge(replace(history, strikes=kills)) for history in islice(drafting(), 16)]
    assert [outcome.broken for outcome in outcomes] == [[]] * 16
    counts = sum((outcome.counts for outcome in outcomes), Counter())
    assert counts["strike: kill"] > 50
    assert counts["responses moved"] > 50
    assert counts["tokens of drafts"] > 1000


@pytest.mark.slow
@pytest.mark.parametrize("planted", WRONG_VERIFICATIONS, ids=lambda planted: planted.__name__)
def test_a_wrong_verification_is_found(planted, monkeypatch):
    monkeypatch.setattr(scripted_engine, "verified", planted)
    assert any(live_and_judge(history).broken for history in islice(drafting(), 5))


@pytest.mark.slow
def test_a_key_of_another_position_is_found(monkeypatch):
    drawn_by_position = ScriptedEngine._drawn

    def of_the_first(engine, slot, version, drafts):
        return [next(drawn_by_position(engine, slot, version, drafts))] * (1 + len(drafts))

    monkeypatch.setattr(ScriptedEngine, "_drawn", of_the_first)
    assert any(live_and_judge(history).broken for history in islice(drafting(), 5))
