"""Prometheus' text format: its borders, and a run's metrics against what the watcher and the reports say."""

import math
from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.records import ReportRecord
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreUnavailable
from tasks.reporting.crew_view import RunView
from tasks.reporting.exposition import NEWEST, SUMS, Committed, exposition
from tasks.reporting.run_metrics import RunMetrics
from tests.committed_runs import begin
from tests.exposed_run import exposed, samples
from tests.journals import Incarnation
from tests.watched_run import PLAN, beat, commit_report, planned

NOTHING = Committed(sums={}, newest={})


def value(text, family, **labels):
    [found] = [each for given, each in samples(text)[family] if labels.items() <= given.items()]
    return found


def look_of(url="run", newest=None):
    return exposition(RunView(run_url=url, iteration=0, phase="no run"), replace(NOTHING, newest=newest or {}), 0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return exposed(tmp_path_factory.mktemp("exposed"))


@pytest.mark.slow
def test_what_the_reports_say_is_what_prometheus_reads(run):
    text, report = run
    for name, (metric, _) in (SUMS | NEWEST).items():
        assert value(text, name) == report.metrics[metric], name
    assert value(text, "gleaner_iterations_total") == 1


@pytest.mark.slow
def test_what_the_watcher_sees_is_what_prometheus_reads(run):
    text, _ = run
    assert value(text, "gleaner_iteration") == 1
    assert value(text, "gleaner_phase", phase="rollout") == 1
    assert sum(each for _, each in samples(text)["gleaner_phase"]) == 1
    assert value(text, "gleaner_responses_planned") == 12
    assert value(text, "gleaner_responses_done") == 3
    assert value(text, "gleaner_groups_recorded") == 1
    assert value(text, "gleaner_journalled_tokens") == 9
    assert value(text, "gleaner_decode_tokens_per_second") == 12.5
    assert value(text, "gleaner_reward_so_far") == 0.25
    assert value(text, "gleaner_members_usd_per_hour") == 1.5
    assert value(text, "gleaner_rollout_remaining_seconds") == 9 * 3 / 12.5
    assert value(text, "gleaner_members", pool="rollout", state="working") == 1
    assert value(text, "gleaner_members", pool="rollout", state="not come") == 1


def test_a_name_of_any_text_stays_one_label():
    url = 'a"b\\c\nd'
    [(labels, _)] = samples(look_of(url))["gleaner_iteration"]
    assert labels == {"run": r"a\"b\\c\nd"}


@pytest.mark.parametrize(
    ("reward", "shown"), [(math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (-0.25, "-0.25"), (1e-7, "1e-07")]
)
def test_numbers_that_json_lacks_are_shown(reward, shown):
    assert f'gleaner_reward{{run="run"}} {shown}\n' in look_of(newest={"reward": reward})


def test_what_is_not_known_is_left_out_and_counters_begin_at_0():
    found = samples(look_of())
    assert "gleaner_reward" not in found
    assert "gleaner_decode_tokens_per_second" not in found
    assert {name: found[name][0][1] for name in SUMS} == dict.fromkeys(SUMS, 0.0)


def test_progress_is_whatever_moves_on_the_watchers_own_clock():
    store, clock = planned(), ManualClock()
    metrics = RunMetrics(store, clock)

    def age():
        clock.advance(10.0)
        return value(metrics.look(), "gleaner_progress_age_seconds")

    assert [age(), age()] == [0, 10]
    member = Incarnation(store, PLAN, 0, "00000-a")
    beat(store, "00000-a", 1)
    assert age() == 20, "a heartbeat without a token is no progress"
    member.write(0, [1, 2, 3])
    assert [age(), age()] == [0, 10]


def test_reports_add_up_and_each_is_read_once():
    store = planned()
    metrics = RunMetrics(store, ManualClock())
    commit_report(store)
    for iteration, lost in enumerate((2.0, 3.0)):
        report = records.read(store, ReportRecord, layout.report(0))
        told = replace(report, iteration=iteration, metrics={"preempt/count": lost, "reward": lost})
        records.put(store, layout.report(iteration), told)
        text = metrics.look()
    assert (value(text, "gleaner_losses_total"), value(text, "gleaner_reward")) == (5, 3)
    store.asked.clear()
    metrics.look()
    assert layout.report(0) not in store.asked


class ReportsUnread(MemoryStore):
    """It answers the look, and not the question for a whole report."""

    def get(self, key, start=0, end=None):
        if key == layout.report(0) and end is None:
            raise StoreUnavailable("no answer within 5 s")
        return super().get(key, start, end)


def test_a_store_that_does_not_answer_is_told_and_the_rest_stays():
    store, clock = planned(), ManualClock()
    looks = RunMetrics(store, clock).looks(1.0)
    assert value(next(looks), "gleaner_store_answers") == 1
    store.answers = False
    text = next(looks)
    assert (value(text, "gleaner_store_answers"), value(text, "gleaner_responses_planned")) == (0, 8)
    store.answers = True
    assert value(next(looks), "gleaner_store_answers") == 1


def test_reports_that_cannot_be_read_are_told_too():
    store = ReportsUnread()
    begin(store)
    text = RunMetrics(store, ManualClock()).look()
    assert (value(text, "gleaner_store_answers"), value(text, "gleaner_iterations_total")) == (0, 0)
