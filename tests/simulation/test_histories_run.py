"""Simulated runs of several iterations: they are lived through, and bugs put into what lies between them are found."""

from collections import Counter
from dataclasses import replace
from itertools import islice, product

import pytest

from simulation import simulated_step, simulated_trainer
from simulation.judge import live_and_judge
from simulation.simulated_history import Strike, draw_history
from storage.journal import compaction, retention
from storage.records import layout, run
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
    assert sum(bool(draw_history(seed).ahead) for seed in DEFAULT_SEEDS) > 20
    assert {draw_history(seed).ahead for seed in DEFAULT_SEEDS} == {0, 1, 2, 3}
    assert {(draw_history(seed).adapts, draw_history(seed).inexact) for seed in range(50)} == set(
        product((False, True), repeat=2)
    )


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


def test_parts_that_have_lost_the_events_of_turns_are_found(monkeypatch):
    """They equal what they are compared with before the journal is deleted."""
    graded = compaction._graded_row
    monkeypatch.setattr(compaction, "_graded_row", lambda *given: replace(graded(*given), events=()))
    assert is_found(drawn(lambda history: history.script is not None, iterations=2), changed=1)


def test_a_sweep_that_keeps_the_weights_of_the_first_plan_in_flight_only_is_found(monkeypatch):
    in_flight = retention.plans_in_flight
    monkeypatch.setattr(retention, "plans_in_flight", lambda store: in_flight(store)[:1])
    assert is_found(drawn(lambda history: history.ahead == 3, iterations=5), lost=1)


def test_older_weights_that_are_trained_without_correction_are_found(monkeypatch):
    mode = simulated_step.importance_mode
    monkeypatch.setattr(
        simulated_step,
        "importance_mode",
        lambda algorithm, *, same_engine: (
            None if same_engine and algorithm.max_staleness == 2 else mode(algorithm, same_engine=same_engine)
        ),
    )
    assert is_found(drawn(lambda history: history.ahead == 2, iterations=4), changed=1)


def test_a_plan_that_samples_from_too_old_weights_is_found(monkeypatch):
    monkeypatch.setattr(iteration, "published_version", lambda _store, _newest, oldest: max(0, oldest - 1))
    assert is_found(drawn(lambda history: history.ahead, iterations=3), changed=1)


def test_a_member_that_keeps_the_weights_of_an_earlier_iteration_is_found(monkeypatch):
    """It helped with that one, and takes any weights for those of the plan."""
    loaded = Performer._loaded
    monkeypatch.setattr(Performer, "_loaded", lambda one: one._engine._version is not None or loaded(one))
    assert is_found(drawn(iterations=2), changed=1)


def test_a_train_task_that_ends_before_its_checkpoint_is_found(monkeypatch):
    """Its first attempt was lost between the weights and the checkpoint, and the next one finds the weights."""
    monkeypatch.setattr(simulated_trainer, "lacks_state", lambda *_: False)
    freezes = tuple(Strike(at_s=at_s, kind="trainer kill", duration_s=0.0) for at_s in range(20, 300, 5))
    made = (replace(history, inexact=True, strikes=freezes) for history in drawn(iterations=2))
    assert is_found(made, lost=1)


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
