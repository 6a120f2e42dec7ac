"""The conclude task as Flyte calls it: report, metrics, Deck, lease."""

import json

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from storage.clock import SystemClock
from storage.journal.compaction import read_responses
from storage.records import layout, records
from storage.records.records import SettingsRecord
from storage.records.run import acquire_lease, next_iteration, read_report, read_run
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectMissing, StoreDenied
from storage.weights.stored_versions import list_versions
from tasks.conclude import conclude
from tasks.configuration.iteration_config import settings_of
from tasks.configuration.references import PlanReference, TrainOutcome
from tasks.reporting.verification import IntegrityError
from tasks.sampling.session.member import generate_slot
from tests.kept_failures import keep_slot
from tests.small_run import (
    EXECUTION,
    Unreachable,
    config,
    everything,
    memory_store,
    plan_iteration,
    roll_out,
    train_small,
)

pytestmark = pytest.mark.slow

URL = "memory://conclude-task"


def after(reference):
    """What training gives; of this only the reference is used."""
    return TrainOutcome(plan=reference, weight_version=9, reward=9.0)


class Waits(Exception):  # noqa: N818 - what happened
    """Somebody had to wait for the lease."""


class Impatient:
    def wall(self):
        return 0.0

    def monotonic(self):
        return 0.0

    def sleep(self, duration_s):
        raise Waits


@pytest.fixture
def trained(model):
    """(store, reference) of an iteration whose training has ended; a machine hour of rollout costs 3.6 dollars."""
    store = memory_store("conclude-task")
    pools = {"rollout": {"count": 2, "usd_per_hour": 3.6}, "train": {"usd_per_hour": 36.0}}
    reference = plan_iteration(config(URL, model, pools=pools))
    roll_out(URL, 0)
    train_small(URL, 0)
    return store, reference


def test_the_iteration_is_committed_shown_and_priced(trained):
    store, reference = trained
    outcome, *_ = conclude(trained=after(reference), last=False)
    report = read_report(store, 0)
    assert (outcome.run_url, outcome.iteration, outcome.weight_version) == (URL, 0, 1)
    assert outcome.reward == report.metrics["reward"]
    assert outcome.tokens == sum(report.lengths)
    machines_usd = 0.001 * report.metrics["timing_s/rollout_machines"] + 0.01 * report.metrics["timing_s/train"]
    assert report.metrics["requests/crew_puts"] > 0
    assert report.metrics["requests/train_gets"] > 0
    assert report.metrics["cost/usd_requests"] == 0  # of a store that is not on S3
    assert outcome.usd == pytest.approx(machines_usd)
    assert outcome.usd == report.metrics["cost/usd_run"]
    page = store.get(layout.deck(0)).decode()
    assert "<svg" in page
    assert "Gleaner, iteration 0" in page
    assert "<b>so far</b> 1 iteration, " in page
    assert "<b>to go</b> 99 iterations, " in page
    assert '<h2 id="configuration">Configuration</h2>' in page
    assert "num_prompts_per_step: 4" in page


def test_concluding_again_gives_the_same(trained):
    store, reference = trained
    first = conclude(trained=after(reference), last=True)
    before = everything(store)
    assert conclude(trained=after(reference), last=True) == first
    assert everything(store) == before


def test_the_journal_becomes_one_object(trained):
    store, reference = trained
    live = list(read_responses(store, 0))
    conclude(trained=after(reference), last=False)
    assert not any(store.list(folder(0)) for folder in (layout.journal, layout.claims, layout.alive_all))
    compacted = list(read_responses(store, 0))
    assert [row.reward for row in compacted] == [row.reward for row in live]
    assert all(a.equals(b) for a, b in zip(live, compacted, strict=True))
    assert len(compacted) == 12


def test_slots_that_failed_and_pods_that_did_not_come_are_told_at_the_end(model, caplog):
    """In the log and on the Deck, with what to set."""
    store = memory_store("conclude-task")
    reference = plan_iteration(config(URL, model, rollout={"idle_timeout_s": 5.0}))
    generate_slot(URL, 0, 0, lambda: False, SystemClock())  # all of it
    train_small(URL, 0)
    keep_slot(store, 0, EXECUTION, 1, "ValueError: <no> space left", host="far-machine")
    conclude(trained=after(reference), last=False)
    assert "an attempt of slot 1 failed, on far-machine: ValueError: <no> space left" in caplog.text
    assert "had not come" not in caplog.text
    page = store.get(layout.deck(0)).decode()
    assert "an attempt of slot 1 failed, on far-machine: ValueError: &lt;no&gt; space left" in page
    conclude(trained=after(reference), last=True)
    assert "1 rollout pods of this execution had not come" in caplog.text
    assert "pod-pending-timeout" in store.get(layout.deck(0)).decode()


def test_the_run_goes_on_from_what_is_kept(model):
    """Every iteration deletes behind itself, and the next one finds what it begins from."""
    store = memory_store("conclude-task")
    for iteration in range(4):
        reference = plan_iteration(config(URL, model, retention={"keep_weights": 2, "keep_checkpoints": 1}))
        roll_out(URL, iteration)
        train_small(URL, iteration)
        conclude(trained=after(reference), last=False)
    assert next_iteration(store) == 4
    assert list_versions(store, layout.WEIGHTS).newest == 4
    assert list_versions(store, layout.CHECKPOINTS).complete == {4}
    assert [len(list(read_responses(store, iteration))) for iteration in range(4)] == [12] * 4


def test_every_iteration_is_a_line_of_metrics_whatever_became_of_the_lines_before(model):
    store = memory_store("conclude-task")
    mishaps = [
        lambda: store.delete(layout.METRICS),  # a conclusion died between its report and its line
        lambda: store.put(layout.METRICS, b'{"iteration": 7}\n{"iter'),  # a zombie, or a hand
        lambda: None,
    ]
    for iteration, mishap in enumerate(mishaps):
        reference = plan_iteration(config(URL, model))
        roll_out(URL, iteration)
        train_small(URL, iteration)
        conclude(trained=after(reference), last=False)
        lines = [json.loads(line) for line in store.get(layout.METRICS).splitlines()]
        assert [line["iteration"] for line in lines] == list(range(iteration + 1))
        mishap()
    for line in lines:
        report = read_report(store, line["iteration"])
        assert line == report.metrics | {
            "iteration": report.iteration,
            "weight_version": report.iteration + 1,
            "time_s": report.created_at_s,
        }


def test_a_tracker_that_fails_does_not_fail_the_iteration(trained, model, caplog, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store, reference = trained
    told = config(URL, model, tracking={"backends": ["mlflow"]})
    records.put(store, layout.settings(0), SettingsRecord(config=settings_of(told)))
    assert conclude(trained=after(reference), last=True)[0].weight_version == 1
    assert next_iteration(store) == 1
    assert "mlflow may lack iteration 0: LookupError" in caplog.text


def test_trackers_get_the_reports_metrics(trained, model, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    store, reference = trained
    monkeypatch.setattr("tasks.reporting.tracking.DIRECTORY", str(tmp_path))
    told = config(URL, model, tracking={"backends": ["tensorboard"]})
    records.put(store, layout.settings(0), SettingsRecord(config=settings_of(told)))
    conclude(trained=after(reference), last=True)
    [folder] = (tmp_path / "tensorboard").iterdir()
    assert folder.name == f"conclude-task-{read_run(store).nonce[:8]}"
    shown = EventAccumulator(str(folder))
    shown.Reload()
    metrics = read_report(store, 0).metrics
    assert sorted(shown.Tags()["scalars"]) == sorted(metrics)
    assert shown.Scalars("reward")[0].value == pytest.approx(metrics["reward"])


def test_a_journal_is_kept_on_request(model):
    store = memory_store("conclude-task")
    reference = plan_iteration(config(URL, model, retention={"compact": False}))
    roll_out(URL, 0)
    train_small(URL, 0)
    before = store.list(layout.journal(0))
    conclude(trained=after(reference), last=False)
    assert store.list(layout.journal(0)) == before
    assert layout.responses(0) not in store.list("")


def test_what_cannot_be_deleted_does_not_fail_the_iteration(trained, caplog):
    class Keeps(MemoryStore):
        """Everything but deletion is allowed."""

        def delete(self, key):
            raise StoreDenied(f"cannot delete {key}")

    store, reference = trained
    keeps = Keeps()
    for key, body in everything(store).items():
        keeps.put(key, body)
    memory_store("conclude-task", keeps)
    assert conclude(trained=after(reference), last=True)[0].weight_version == 1
    assert "left as it is: iteration 0: cannot delete iterations/000000/" in caplog.text
    assert keeps.list(layout.journal(0))
    acquire_lease(keeps, "another", 60, Impatient())


def test_whoever_waits_for_the_lease_does_not_wait_for_what_is_for_people(trained):
    class NoMetrics(MemoryStore):
        def put(self, key, body):
            if key == layout.METRICS:
                raise StoreDenied(f"cannot write {key}")
            super().put(key, body)

    store, reference = trained
    denies = NoMetrics()
    for key, body in everything(store).items():
        denies.put(key, body)
    memory_store("conclude-task", denies)
    with pytest.raises(StoreDenied, match=layout.METRICS):
        conclude(trained=after(reference), last=True)
    assert denies.list(layout.journal(0)) == []
    acquire_lease(denies, "another", 60, Impatient())


def test_something_else_below_evaluations_fails_no_conclusion(trained, caplog):
    store, reference = trained
    store.put("evaluations/notes.json", b'{"format": 2}')
    store.put(layout.evaluation("00000000-ab"), b'{"format": 2}')
    conclude(trained=after(reference), last=True)
    assert next_iteration(store) == 1
    assert len(store.get(layout.METRICS).splitlines()) == 1
    assert "left out: object 'evaluations/00000000-ab.json' is corrupt" in caplog.text
    assert "notes" not in caplog.text


def test_only_the_last_iteration_of_an_execution_lets_others_in(trained):
    store, reference = trained
    conclude(trained=after(reference), last=False)
    with pytest.raises(Waits):
        acquire_lease(store, "another", 60, Impatient())
    conclude(trained=after(reference), last=True)
    acquire_lease(store, "another", 60, Impatient())


def test_what_does_not_add_up_is_not_committed_and_keeps_the_lease(trained):
    store, reference = trained
    store.delete(store.list(layout.batches(0))[-1])
    with pytest.raises(IntegrityError, match="never: "):
        conclude(trained=after(reference), last=True)
    assert layout.report(0) not in store.list("")
    assert layout.deck(0) not in store.list("")
    with pytest.raises(Waits):
        acquire_lease(store, "another", 60, Impatient())
    acquire_lease(store, EXECUTION, 60, Impatient())


def test_without_training_nothing_is_committed(model):
    store = memory_store("conclude-task")
    reference = plan_iteration(config(URL, model))
    roll_out(URL, 0)
    with pytest.raises(ObjectMissing, match=r"training\.json"):
        conclude(trained=after(reference), last=True)
    assert layout.report(0) not in store.list("")


def test_the_task_shows_a_deck():
    assert conclude.enable_deck


def test_a_store_that_does_not_answer_is_worth_another_attempt():
    memory_store("conclude-task", Unreachable())
    reference = PlanReference(run_url=URL, iteration=0, weight_version=0, execution="e")
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        conclude(trained=after(reference), last=True)
