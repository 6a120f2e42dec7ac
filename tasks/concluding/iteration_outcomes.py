"""The outcomes of committed iterations, as other tasks and workflows take them."""

from storage.records.records import ReportRecord
from storage.records.run import connect_to_run, read_report
from tasks.configuration.references import IterationOutcome


def outcome_of(run_url: str, report: ReportRecord) -> IterationOutcome:
    """The outcome of the iteration that a report commits."""
    return IterationOutcome(
        run_url=run_url,
        iteration=report.iteration,
        weight_version=report.weight_version,
        reward=report.metrics.get("reward"),
        loss=report.metrics.get("loss"),
        tokens=int(report.metrics["num_tokens"]),
        tokens_recovered=int(report.metrics["resume/tokens_recovered"]),
        usd=report.metrics["cost/usd_iter"],
        seconds=report.metrics["timing_s/iteration"],
    )


def outcomes(last: IterationOutcome, count: int) -> list[IterationOutcome]:
    """The outcomes of `count` iterations of a run, of which `last` is the last, in order."""
    store = connect_to_run(last.run_url)
    first = max(0, last.iteration - count + 1)
    return [outcome_of(last.run_url, read_report(store, index)) for index in range(first, last.iteration + 1)]
