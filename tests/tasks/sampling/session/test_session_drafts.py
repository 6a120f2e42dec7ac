"""A run whose members verify drafts has the tokens of a run whose members do not, and the numbers may change between
iterations."""

import pytest

import gleaner
from tasks.sampling.engines.speculation import Speculation
from tests.small_run import (
    commit_iteration,
    config,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

pytestmark = pytest.mark.slow


def tokens_of_a_run(name, model, speculations):
    memory_store(name)
    url, found = f"memory://{name}", []
    for iteration, speculation in enumerate(speculations):
        rollout = {"engine": "torch", "max_responses_in_flight": 4, "speculation": speculation}
        plan_iteration(config(url, model, rollout=rollout))
        roll_out(url, iteration)
        train_small(url, iteration)
        commit_iteration(url, iteration)
        rows = gleaner.open(url).responses(iteration).to_pylist()
        found.append({row["response"]: row["token_ids"] for row in rows})
    return found


def test_the_journal_of_a_run_with_drafts_is_that_of_one_without(tmp_path, monkeypatch):
    settled, settle = [], Speculation.settle

    def noted(self, deltas):
        settle(self, deltas)
        settled.append(self.totals)

    monkeypatch.setattr(Speculation, "settle", noted)
    model = model_directory(tmp_path / "model")
    plain = tokens_of_a_run("plain", model, [{"drafts": 0}, {"drafts": 0}])
    assert not settled
    drafted = tokens_of_a_run("drafted", model, [{"drafts": 4}, {"drafts": 3, "source": "ngram"}])
    assert drafted == plain
    assert len(plain[0]) == 12
    assert sum(len(tokens) for tokens in plain[0].values()) > 100
    assert max(totals.accepted for totals in settled) > 5
