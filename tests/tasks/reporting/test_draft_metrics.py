"""What drafts were worth, from engine to report, against counts of what drafters guessed and engines returned."""

import time
from dataclasses import replace

import pytest

from storage.clock import SystemClock
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.draft_totals import DraftTotals
from storage.records.records import SlotLife
from storage.stores.connect import connect
from tasks.reporting.conclusion import draft_metrics
from tasks.sampling.engines.suffix_drafter import SuffixDrafter
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.session.member import generate_slot
from tests.sessions import Killed
from tests.small_run import (
    commit_iteration,
    config,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

NAMES = {"rollout/drafted", "rollout/accepted", "rollout/tokens_per_step", "rollout/draft_saved_s"}


class Counted:
    """Counts drafts and tokens where they leave drafter and engine, and kills the process in a step if told."""

    def __init__(self, monkeypatch):
        self.steps = self.tokens = self.drafted = self.accepted = 0
        self.kill_at = None
        self._guessed, draft, step = {}, SuffixDrafter.draft, TorchEngine.step

        def guess(drafter, responses, most):
            found = draft(drafter, responses, most)
            self._guessed = dict(zip(responses, map(list, found), strict=True))
            return found

        def counted(engine):
            if self.kill_at is not None:
                time.sleep(0.05)
                self.kill_at -= 1
                if self.kill_at < 0:
                    raise Killed
            self._guessed = {}
            deltas = step(engine)
            self._count(deltas)
            return deltas

        monkeypatch.setattr(SuffixDrafter, "draft", guess)
        monkeypatch.setattr(TorchEngine, "step", counted)

    def _count(self, deltas):
        self.steps += len(deltas)
        for delta in deltas:
            guessed, tokens = self._guessed.get(delta.response, []), list(delta.token_ids)
            self.tokens += len(tokens)
            self.drafted += len(guessed)
            self.accepted += next(
                (n for n in range(min(len(guessed), len(tokens)), 0, -1) if guessed[:n] == tokens[:n]), 0
            )

    def metrics(self):
        return {
            "rollout/drafted": self.drafted,
            "rollout/accepted": self.accepted,
            "rollout/tokens_per_step": pytest.approx(self.tokens / self.steps),
        }


def a_run(name, model, speculation, **rollout):
    memory_store(name)
    settings = config(
        f"memory://{name}",
        model,
        sampling={"temperature": 0.05, "max_completion_length": 40},
        rollout={"engine": "torch", "max_responses_in_flight": 4, "speculation": speculation, **rollout},
    )
    plan_iteration(settings)
    return settings.run.url


def concluded(url):
    train_small(url, 0)
    return commit_iteration(url, 0)


@pytest.mark.slow
def test_a_report_has_what_engines_and_drafters_did(tmp_path, monkeypatch):
    url = a_run("drafts-counted", model_directory(tmp_path / "model"), {"drafts": 4})
    counted = Counted(monkeypatch)  # the plan has tried the model
    roll_out(url, 0)
    report = concluded(url)
    found = {name: report.metrics[name] for name in NAMES - {"rollout/draft_saved_s"}}
    assert found == counted.metrics()
    assert counted.tokens == report.metrics["num_tokens"]
    assert 20 < counted.accepted < counted.drafted
    seconds = [life.drafts.saved_s for life in report.lives if life.drafts.saved_s is not None]
    assert report.metrics.get("rollout/draft_saved_s", 0.0) == sum(seconds)


@pytest.mark.slow
def test_of_a_killed_member_the_last_heartbeat_counts(tmp_path, monkeypatch):
    url = a_run("drafts-killed", model_directory(tmp_path / "model"), {"drafts": 4}, flush_interval_s=0.1)
    counted = Counted(monkeypatch)
    counted.kill_at = 12
    with pytest.raises(Killed):
        generate_slot(url, 0, 0, lambda: False, SystemClock())
    (key,) = connect(url).list(layout.alive_all(0))
    told = records.read(connect(url), HeartbeatRecord, key)
    assert told.state == "working"
    assert 0 < told.drafts.tokens <= counted.tokens
    assert 0 < told.drafts.steps <= counted.steps
    counted.kill_at, counted.steps, counted.tokens = None, told.drafts.steps, told.drafts.tokens
    counted.drafted, counted.accepted = told.drafts.drafted, told.drafts.accepted
    roll_out(url, 0)
    report = concluded(url)
    victim = next(life for life in report.lives if life.incarnation == told.incarnation)
    assert (victim.state, victim.drafts) == ("lost", told.drafts)
    assert {name: report.metrics[name] for name in counted.metrics()} == counted.metrics()


@pytest.mark.slow
def test_a_run_without_drafts_has_no_such_metric_and_no_such_field(tmp_path):
    url = a_run("drafts-none", model_directory(tmp_path / "model"), {"drafts": 0})
    roll_out(url, 0)
    store, report = connect(url), concluded(url)
    assert not NAMES & report.metrics.keys()
    told = [layout.report(0), *store.list(layout.alive_all(0))]
    assert len(told) == 3
    assert not any(b'"drafts"' in store.get(key) for key in told)


def life(drafts):
    return SlotLife(
        slot=0,
        incarnation="a",
        pool="rollout",
        started_at_s=0.0,
        ended_at_s=1.0,
        state="gone",
        tokens_kept=0,
        tokens_recovered=0,
        tokens_regenerated=0,
        drafts=drafts,
    )


def test_metrics_add_up_the_lives_that_draft():
    one = DraftTotals(steps=10, tokens=16, drafted=20, accepted=6, saved_s=1.5)
    other = replace(one, steps=30, tokens=44, saved_s=-0.25)
    assert draft_metrics([]) == draft_metrics([life(None)]) == {}
    assert draft_metrics([life(None), life(one), life(other)]) == {
        "rollout/drafted": 40.0,
        "rollout/accepted": 12.0,
        "rollout/tokens_per_step": 60 / 40,
        "rollout/draft_saved_s": 1.25,
    }
    unmeasured = draft_metrics([life(replace(one, saved_s=None))])
    assert unmeasured.keys() == NAMES - {"rollout/draft_saved_s"}
    assert draft_metrics([life(DraftTotals())]) == {"rollout/drafted": 0.0, "rollout/accepted": 0.0}
