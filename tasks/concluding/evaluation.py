"""The work of the evaluate task: measure, then write the metrics, the trackers' entries and the page."""

from storage.clock import Clock
from storage.records import layout
from storage.records.evaluation_records import EvaluationRecord
from storage.records.evaluations import evaluations
from storage.records.run import exists, read_plan, read_run
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.references import EvaluationOutcome
from tasks.evaluation.measure import ITERATION, measure
from tasks.reporting.deck import page
from tasks.reporting.evaluation_tab import evaluation_tab
from tasks.reporting.metrics_lines import write_metrics
from tasks.reporting.tracking import TRACKERS, track, tracked_evaluation


def measure_and_report(url: str, clock: Clock, execution: str = "") -> tuple[EvaluationOutcome, str]:
    """Measure the evaluation at `url`; returns its outcome, and HTML for the Deck.

    The page is written last: if it exists, the metrics and trackers are up to date.
    """
    record, _ = measure(url, clock, execution)
    run_url, name = layout.evaluated(url)
    run = connect(run_url)
    tab = evaluation_tab(record, evaluations(run))
    if not exists(run, layout.evaluation_deck(name)):
        write_metrics(run)
        _log_to_trackers(run, url, record)
        run.put(layout.evaluation_deck(name), page(f"Gleaner, evaluation {name}", {"Evaluation": tab}).encode())
    outcome = EvaluationOutcome(
        run_url=run_url, evaluation=name, weight_version=record.weight_version, metrics=record.metrics
    )
    return outcome, tab


def _log_to_trackers(run: ObjectStore, url: str, record: EvaluationRecord) -> None:
    """Log the evaluation where the section `tracking` says; a tracker that fails is logged, and skipped."""
    store = connect(url)
    config = config_in_force(store, read_plan(store, ITERATION))
    if config.tracking.backends:
        entry = tracked_evaluation(record, config.tracking, run_id=read_run(run).nonce, run_url=run.url)
        track(entry, {backend: TRACKERS[backend] for backend in config.tracking.backends})
