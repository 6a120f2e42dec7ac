"""What the evaluate task does: measure, and tell the metrics, the trackers and whoever reads the page."""

from storage import layout
from storage.clock import Clock
from storage.connect import connect
from storage.evaluation_records import EvaluationRecord
from storage.evaluations import evaluations
from storage.run import exists, read_config, read_plan, read_run
from storage.store import ObjectStore
from tasks.configuration.references import EvaluationOutcome
from tasks.configuration.run_config import parse
from tasks.evaluation.measure import ITERATION, measure
from tasks.reporting.deck import page
from tasks.reporting.evaluation_tab import evaluation_tab
from tasks.reporting.metrics_lines import write_metrics
from tasks.reporting.tracking import TRACKERS, track, tracked_evaluation


def measure_and_tell(url: str, clock: Clock, execution: str = "") -> tuple[EvaluationOutcome, str]:
    """Measure the evaluation at `url`; its outcome, and HTML for the Deck.

    Its page is written last: where it is, metrics and trackers have been told.
    """
    record, _ = measure(url, clock, execution)
    run_url, name = layout.evaluated(url)
    run = connect(run_url)
    tab = evaluation_tab(record, evaluations(run))
    if not exists(run, layout.evaluation_deck(name)):
        write_metrics(run)
        _tell_trackers(run, url, record)
        run.put(layout.evaluation_deck(name), page(f"Gleaner, evaluation {name}", {"Evaluation": tab}).encode())
    outcome = EvaluationOutcome(
        run_url=run_url, evaluation=name, weight_version=record.weight_version, metrics=record.metrics
    )
    return outcome, tab


def _tell_trackers(run: ObjectStore, url: str, record: EvaluationRecord) -> None:
    """Log the evaluation where the section `tracking` says; a tracker that fails is told, and left behind."""
    store = connect(url)
    config = parse(read_config(store, read_plan(store, ITERATION)))
    if config.tracking.backends:
        entry = tracked_evaluation(record, config.tracking, run_id=read_run(run).nonce, run_url=run.url)
        track(entry, {backend: TRACKERS[backend] for backend in config.tracking.backends})
