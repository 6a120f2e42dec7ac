"""Simulated runs of several iterations: they are lived through, and bugs put into what lies between them are found."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from simulation.judge import live_and_judge
from simulation.simulated_history import draw_history
from storage import layout, retention, run
from storage.weights import versions
from tasks.learning.recorded_batches import RecordedBatches
from tasks.preparing import iteration
from tasks.reporting import conclusion
from tasks.sampling.session.performer import Performer
from tests.judged_histories import DEFAULT_SEEDS, drawn, is_found

pytestmark = pytest.mark.slow


def test_runs_of_several_iterations_are_drawn():
    numbers = Counter(draw_history(seed).iterations for seed in DEFAULT_SEEDS)
    assert numbers[1] > 200
    assert min(numbers[2], numbers[3]) > 20
    assert sum(draw_history(seed).ahead for seed in DEFAULT_SEEDS) > 20


def test_a_run_goes_on_over_every_iteration_and_is_eventful():
    outcomes = [live_and_judge(history) for history in islice(drawn(iterations=3), 5)]
    counts = sum((outcome.counts for outcome in outcomes), Counter())
    assert [outcome.broken for outcome in outcomes] == [[]] * 5
    assert counts["path: plan done"] >= 15
    assert counts["path: conc done"] >= 15
    for what in ("path: plan Crashed", "path: conc Crashed", "path: swee done", "tasks of the path frozen"):
        assert counts[what] > 0, what


def test_claims_that_are_deleted_before_the_journal_are_found(monkeypatch):
    sweep_iteration = retention._sweep_iteration

    class Kept:
        """A deletion that waits."""

        dry_run = False

        def __init__(self):
            self.phases = []

        def run(self, keys):
            self.phases.append(keys)

    def backwards(store, iteration, deletion, compacted):
        kept = Kept()
        sweep_iteration(store, iteration, kept, compacted)
        for keys in reversed(kept.phases):
            deletion.run(keys)

    monkeypatch.setattr(retention, "_sweep_iteration", backwards)
    assert is_found(drawn(iterations=2), lost=1)


def test_a_journal_that_is_deleted_uncompacted_is_found(monkeypatch):
    monkeypatch.setattr(retention, "compact", lambda *_: None)
    assert is_found(drawn(iterations=2), lost=1)


def test_weights_that_are_deleted_before_their_manifest_are_found(monkeypatch):
    def objects_first(found, kept, current, deletion):
        for version, keys in found.keys.items():
            if version < current and version not in kept:
                deletion.run(sorted(keys))

    monkeypatch.setattr(retention, "_sweep_versions", objects_first)
    assert is_found(drawn(iterations=3), lost=1)


def test_a_sweep_that_deletes_what_kept_versions_refer_to_is_found(monkeypatch):
    monkeypatch.setattr(retention, "bases", lambda _, version: [version])
    assert is_found(drawn(iterations=3), lost=1)


def test_a_plan_that_samples_from_too_old_weights_is_found(monkeypatch):
    monkeypatch.setattr(iteration, "published_version", lambda _store, _newest, oldest: max(0, oldest - 1))
    assert is_found(drawn(lambda history: history.ahead, iterations=3), changed=1)


def test_a_member_that_keeps_the_weights_of_an_earlier_iteration_is_found(monkeypatch):
    """It helped with that one, and takes any weights for those of the plan."""
    loaded = Performer._loaded
    monkeypatch.setattr(Performer, "_loaded", lambda one: one._engine._version is not None or loaded(one))
    assert is_found(drawn(iterations=2), changed=1)


def test_weights_that_are_there_before_their_checkpoint_are_found(monkeypatch):
    def before_all(store, version, tensors, metadata, *, before_manifest=dict, **others):
        manifest = publish(store, version, tensors, metadata, **others)
        before_manifest()
        return manifest

    publish = versions.publish_version
    monkeypatch.setattr("simulation.simulated_step.publish_version", before_all)
    assert is_found(drawn(iterations=2), lost=1)


def test_a_conclusion_that_counts_the_tokens_of_nothing_is_found(monkeypatch):
    monkeypatch.setattr(conclusion, "verified_parts", lambda *_: iter(()))
    assert is_found(drawn(iterations=2), changed=1)


def test_an_execution_that_takes_the_lease_of_a_living_one_is_found(monkeypatch):
    monkeypatch.setattr(run, "_await_lease", lambda _store, epoch, *_: epoch)
    assert is_found(drawn(iterations=2), doubled=1)


def test_a_restarted_trainer_that_forgets_what_it_had_trained_is_found(monkeypatch):
    """Its weights are those of the batches that it recorded itself."""
    batch = RecordedBatches._batch

    def only_new(batches, number):
        known = run.exists(batches._store, layout.batch(batches._plan.iteration, number))
        found = batch(batches, number)
        return replace(found, responses=()) if known else found

    monkeypatch.setattr(RecordedBatches, "_batch", only_new)
    assert is_found(drawn(iterations=2), changed=1)
