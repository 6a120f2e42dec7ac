"""Simulated histories with a pool of scorers: none breaks a rule, and bugs put into the scorers are found."""

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks import scoring_histories
from simulation import simulated_scoring
from simulation.judge_scoring import live_and_judge_scoring
from simulation.simulated_scorer import SimulatedScorer
from simulation.simulated_scoring import draw_scoring_history
from storage.journal.journal import JournalWriter
from storage.waiting import Wait
from tasks.learning import awaited_scores, ended_groups, score_journal, score_session
from tasks.learning.score_journal import ScoreJournal
from tasks.learning.score_session import ScoreSession

pytestmark = pytest.mark.slow
SEEDS = range(24)


@pytest.fixture(scope="module")
def verdicts():
    return scoring_histories.run_seeds(SEEDS)


def test_no_history_breaks_a_rule(verdicts):
    assert {verdict.seed: verdict.broken for verdict in verdicts if verdict.broken} == {}


@pytest.mark.exhaustive
def test_no_history_of_many_breaks_a_rule():
    verdicts = scoring_histories.run_seeds(range(24, 300))
    assert {verdict.seed: verdict.broken for verdict in verdicts if verdict.broken} == {}


def test_the_histories_are_eventful(verdicts):
    counts = sum((verdict.counts for verdict in verdicts), Counter())
    for kind in ("kill", "notice", "freeze", "suspend"):
        assert counts[f"scorers: {kind}"] > 3, kind
    assert counts["crash: after put scoring"] + counts["crash: before put scoring"] > 1
    assert counts["late claims"] > 50
    assert counts["claims on groups of others"] > 5
    assert counts["responses scored again"] > 0
    assert counts["responses trained"] > 300


def is_found(rule, wanted=lambda _: True, seeds=range(200)):
    """Whether a history that has what is wanted breaks the rule; those behind it are not lived."""
    histories = filter(wanted, map(draw_scoring_history, seeds))
    return any(
        broken.startswith(f"{rule}:") for history in histories for broken in live_and_judge_scoring(history).broken
    )


def is_racing(history):
    """Whether claims are late while a frozen member wakes up, whose tokens are not its successor's."""
    return bool(history.succeeded) and history.late_claims > 0 and history.unsteady > 0.5


def is_hard_on_scorers(history):
    return len(history.strikes) > 4 and history.shard_tokens < 10


def test_scores_shifted_by_one_are_found(monkeypatch):
    right = score_journal.append_scores

    def shifted(pending, number, epoch, sampled, scores, tokens, named):
        right(pending, number, epoch, sampled, replace(scores, logprobs=scores.logprobs.roll(1)), tokens, named)

    monkeypatch.setattr(score_session, "append_scores", shifted)
    assert is_found("changed")


def test_a_scorer_that_goes_on_one_token_late_is_found(monkeypatch):
    right = ScoreJournal.place

    def late(journal, *named, **how):
        place = right(journal, *named, **how)
        is_begun = place is not None and place.num_scored > 0 and not place.is_complete
        return replace(place, num_scored=place.num_scored + 1) if is_begun else place

    monkeypatch.setattr(ScoreJournal, "place", late)
    assert is_found("error", is_hard_on_scorers)


def test_a_scorer_whose_scores_of_a_void_end_count_is_found(monkeypatch):
    for module in (ended_groups, score_journal, awaited_scores):
        monkeypatch.setattr(module, "identity", lambda _response: b"any")
    assert is_found("error", is_racing)


def test_two_writers_of_one_shard_number_are_found(monkeypatch):
    class WithoutName(SimulatedScorer):
        def __init__(self, process, store, plan, config, scorer, **how):
            super().__init__(process, store, plan, config, scorer, **how)
            self.incarnation = f"{0:05d}-{0:016x}"
            self._writer = JournalWriter(self._journal.store, plan.iteration, self.incarnation, 0)

    monkeypatch.setattr(simulated_scoring, "SimulatedScorer", WithoutName)
    assert is_found("error", lambda history: len(history.arrivals_s) > 1)


def test_a_claim_that_seals_without_a_look_is_found(monkeypatch):
    class Blind:
        def advance(self, _incarnation):
            return -1

    right = score_journal.take_over
    monkeypatch.setattr(
        score_journal, "take_over", lambda store, plan, book, _shards, **how: right(store, plan, book, Blind(), **how)
    )
    assert is_found("lost", is_hard_on_scorers)


def test_a_scorer_that_waits_for_the_dead_is_found(monkeypatch):
    right = ScoreSession._state

    def trusting(session, group, ended, signs):
        state = right(session, group, ended, signs)
        owner = session._journal.reader.book.owner(min(ended.identities)) if ended.identities else None
        others = owner is not None and owner.incarnation != session.incarnation
        return "in work" if state == "due" and others else state

    monkeypatch.setattr(ScoreSession, "_state", trusting)
    assert is_found("livelock", is_hard_on_scorers)


def test_a_scorer_that_hardly_pauses_between_looks_is_found(monkeypatch):
    class Hasty(Wait):
        def pause(self, interval_s):
            super().pause(interval_s / 20)

    monkeypatch.setattr(score_session, "Wait", Hasty)
    assert is_found("livelock", lambda history: history.arrivals_s[0] == 0 and not history.strikes)


def test_a_history_is_a_function_of_its_seed():
    first, second = (live_and_judge_scoring(draw_scoring_history(3)).ledgers.common.events for _ in range(2))
    assert first == second
