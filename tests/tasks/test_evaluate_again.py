"""Evaluations that are interrupted, that several measure, that end while others write: nothing is lost or undone."""

import json
from dataclasses import replace

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from storage.clock import SystemClock
from storage.records import layout
from storage.records.evaluations import begun_evaluations, evaluations
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject, StoreUnavailable
from tasks.concluding.evaluation import measure_and_report
from tasks.concluding.iteration import commit_and_report
from tasks.configuration.references import IterationOutcome
from tasks.configuration.run_config import dump
from tasks.evaluate import evaluate, plan_evaluation
from tasks.evaluation.measure import measure
from tasks.preparing.evaluation import prepare_beside
from tasks.reporting.watch import Watcher
from tasks.sampling.session.join import JoinLimits, join_run
from tasks.sampling.session.member import generate_slot
from tests.evaluated_run import EVALUATION, URL, planned, sampled
from tests.small_run import (
    OWN_REWARD,
    config,
    everything,
    memory_store,
    plan_iteration,
    roll_out,
    train_small,
)


def filled(store, objects):
    """The store with these objects, as the one of the run from now on."""
    for key, body in objects.items():
        MemoryStore.put(store, key, body)
    return memory_store("evaluate", store)


class Once(MemoryStore):
    """Does something else, once, at the first call of a verb with a key that ends so; before it, or after it."""

    def __init__(self, verb, ending, act, *, after=False):
        super().__init__("evaluate")
        self.verb, self.ending, self.act, self.after = verb, ending, act, after

    def _at(self, verb, key, *, after):
        if self.act and (verb, after) == (self.verb, self.after) and key.endswith(self.ending):
            act, self.act = self.act, None
            act()

    def list(self, prefix, after=""):
        self._at("list", prefix, after=False)
        return super().list(prefix, after)

    def create(self, key, body):
        self._at("create", key, after=False)
        done = super().create(key, body)
        self._at("create", key, after=True)
        return done

    def put(self, key, body):
        self._at("put", key, after=False)
        super().put(key, body)


def unavailable():
    raise StoreUnavailable("no answer")


def lines(store):
    return [json.loads(line) for line in store.get(layout.METRICS).splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "ending", "after"),
    [("list", layout.alive_all(0), False), ("create", layout.closed(0), True), ("list", layout.claims(0), False)],
)
def test_whoever_is_slower_finds_the_record_of_whoever_was_faster(store, settings, verb, ending, after):
    """The faster one deletes journal and claims under the reader."""
    url = sampled(settings)
    firsts = []
    filled(Once(verb, ending, lambda: firsts.append(measure(url, SystemClock())), after=after), everything(store))
    record, is_new = measure(url, SystemClock())
    assert not is_new
    assert firsts == [(record, True)]


def test_what_is_wrong_without_a_record_is_still_told(store, settings):
    url = sampled(settings)
    [shard, *_] = connect(url).list(layout.journal(0))
    connect(url).put(shard, b"damaged")
    with pytest.raises(CorruptObject):
        measure(url, SystemClock())
    assert evaluations(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("key", [layout.responses(0), layout.METRICS])
def test_another_attempt_tells_what_the_first_one_did_not(store, model, key, caplog, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settings = config(URL, model, rewards=OWN_REWARD, evaluation=EVALUATION, tracking={"backends": ["mlflow"]})
    url = sampled(settings)
    reference, _ = plan_evaluation(config=dump(settings), version=1)
    verb = "put" if key == layout.METRICS else "create"
    flaky = filled(Once(verb, key, unavailable), everything(store))
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        evaluate(plan=reference)
    deck = layout.evaluation_deck(layout.evaluated(url)[1])
    assert len(evaluations(flaky)) == 1
    assert deck not in flaky.list("")
    evaluate(plan=reference)
    assert "pass@3" in flaky.get(deck).decode()
    assert [line["weight_version"] for line in lines(flaky)] == [1, 1]
    assert caplog.text.count("mlflow may lack") == 1  # asked once, in vain
    before = everything(flaky)
    evaluate(plan=reference)
    assert everything(flaky) == before
    assert caplog.text.count("mlflow may lack") == 1


@pytest.mark.slow
def test_a_conclusion_and_an_evaluation_that_write_at_the_same_time_lose_no_line(store, settings):
    url = sampled(settings)
    reference = plan_iteration(settings)
    roll_out(URL, 1)
    train_small(URL, 1)
    outcomes: list[IterationOutcome] = []
    meanwhile = Once("put", layout.METRICS, lambda: outcomes.append(commit_and_report(reference, last=True)[0]))
    whole = filled(meanwhile, everything(store))
    measure_and_report(url, SystemClock())
    assert [outcome.weight_version for outcome in outcomes] == [2]
    assert [line.get("iteration") for line in lines(whole)] == [0, None, 1]


@pytest.mark.slow
def test_a_conclusion_adds_the_line_of_an_evaluation_that_ends_meanwhile(store, settings):
    url = sampled(settings)
    reference = plan_iteration(settings)
    roll_out(URL, 1)
    train_small(URL, 1)
    whole = filled(Once("put", layout.METRICS, lambda: measure(url, SystemClock())), everything(store))
    commit_and_report(reference, last=True)
    assert [line.get("iteration") for line in lines(whole)] == [0, None, 1]


# What an execution of training takes up.


def taken_up(settings, version):
    """The version that an execution evaluates beside its first iteration, which begins with `version`; None: none."""
    reference, slots, due = prepare_beside(settings, version, "e", SystemClock(), resume=True)
    for slot in slots:
        generate_slot(reference.run_url, 0, slot, lambda: False, SystemClock())
    for each in due:
        evaluate(plan=each)
    return reference.weight_version if slots else None


@pytest.mark.slow
def test_version_0_is_evaluated_once(store, settings):
    assert taken_up(settings, 0) == 0
    assert [record.weight_version for record in evaluations(store)] == [0]
    before = everything(store)
    assert taken_up(settings, 0) is None
    assert everything(store) == before


@pytest.mark.slow
def test_interrupted_evaluations_are_ended_one_after_the_other(store, settings):
    every = replace(settings, evaluation=replace(settings.evaluation, interval=1))
    for version in (0, 1):
        planned(every, version)
    assert [taken_up(every, 2), taken_up(every, 2), taken_up(every, 2)] == [0, 1, None]
    assert begun_evaluations(store) == []


@pytest.mark.slow
def test_what_nobody_has_begun_comes_before_what_was_interrupted(store, settings):
    every = replace(settings, evaluation=replace(settings.evaluation, interval=1))
    planned(every, 0)
    assert [taken_up(every, 1), taken_up(every, 1)] == [1, 0]


@pytest.mark.slow
def test_what_was_begun_with_other_settings_or_is_not_due_or_gone_is_left_alone(store, settings):
    planned(settings, 1)  # its interval is 2
    planned(replace(settings, evaluation=replace(settings.evaluation, num_generations=2)), 0)
    gone = planned(settings, 0)[0].run_url
    assert taken_up(settings, 0) == 0
    store.delete(layout.evaluation(layout.evaluated(gone)[1]))
    store.delete(layout.manifest(layout.weights(0)))
    before = everything(store)
    assert taken_up(settings, 3) is None
    assert everything(store) == before


# Others who look.


@pytest.mark.slow
def test_whoever_watches_sees_that_it_has_ended(store, settings):
    url = sampled(settings)
    record, _ = measure(url, SystemClock())
    view = Watcher(connect(url), SystemClock()).look()
    assert (view.iteration, view.phase, view.members) == (0, "ended", ())
    assert (view.totals.responses_planned, view.totals.responses_done) == (15, 15)
    assert view.totals.tokens == record.metrics["val/num_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [layout.claims(0), layout.alive_all(0)])
def test_whoever_watches_while_it_ends_sees_that(store, settings, ending):
    url = sampled(settings)
    whole = filled(Once("list", ending, None), everything(store))
    watcher = Watcher(connect(url), SystemClock())
    assert watcher.look().phase == "training"
    whole.act = lambda: measure(url, SystemClock())
    assert watcher.look().phase in ("training", "ended")
    assert watcher.look().phase == "ended"


@pytest.mark.slow
def test_whoever_joins_after_its_end_leaves(store, settings):
    url = sampled(settings)
    measure(url, SystemClock())
    assert join_run(url, JoinLimits(), lambda: False, SystemClock()) == 0
