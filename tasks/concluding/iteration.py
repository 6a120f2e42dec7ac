"""The work of the conclude task: verify and commit the iteration, and delete what is no longer needed."""

import logging
from collections.abc import Iterable

from resources.prices import request_prices
from resources.visible_text import markup
from resources.work_log import at_work
from storage.clock import SystemClock
from storage.journal.retention import sweep
from storage.records import layout
from storage.records.evaluations import evaluations
from storage.records.failures import FailureRecord, last_failures, slot_failures
from storage.records.records import CONTROL_POOL, TRAIN_POOL, PlanRecord, ReportRecord
from storage.records.run import connect_to_run, read_plan, read_run, release_lease
from storage.stores.store import CorruptObject, ObjectStore
from tasks.concluding.host_tab import host_tab
from tasks.concluding.iteration_outcomes import outcome_of
from tasks.concluding.responses_tab import responses_tab
from tasks.configuration.in_force import in_force
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.references import IterationOutcome, PlanReference
from tasks.configuration.run_config import RunConfig, dump, parse_held
from tasks.reporting import charts
from tasks.reporting.conclusion import conclude_iteration, cut_line
from tasks.reporting.crew_presence import await_goodbyes, described, slots_not_come
from tasks.reporting.deck import page, render, styled
from tasks.reporting.last_failures import failure_line
from tasks.reporting.metrics_lines import write_metrics
from tasks.reporting.plan_tab import plan_tab
from tasks.reporting.scorer_costs import scorer_prices
from tasks.reporting.tracking import TRACKERS, track, tracked_iteration
from tasks.viewing.run_summary import run_facts, spent_facts

log = logging.getLogger(__name__)
# How many iterations a conclusion searches for the rest of an interrupted deletion; `gleaner sweep` searches all.
ITERATIONS_SWEPT = 8
# How long a member may take to leave, after the flush at which it learns that the iteration is closed.
GOODBYE_S = 3.0


def commit_and_report(plan: PlanReference, *, last: bool) -> tuple[IterationOutcome, dict[str, str]]:
    """Commit the iteration and inform people; returns its outcome, and HTML for the Deck by the name of its tab."""
    store = connect_to_run(plan.run_url)
    written = read_plan(store, plan.iteration)
    config = config_in_force(store, written)
    planned = parse_held(written.config)
    # A pool may have been removed from the configuration since.
    rollout_pools = planned.pools.rollout_pools | config.pools.rollout_pools
    prices = {name: pool.price_usd_per_h for name, pool in rollout_pools.items()} | {
        TRAIN_POOL: config.trainer.nnodes * config.pools.train.price_usd_per_h,
        CONTROL_POOL: config.pools.control.price_usd_per_h,
        **scorer_prices(planned, config),
    }
    at_work("waiting for members to say that they have left")
    await_goodbyes(store, written, config.rollout.flush_interval_s + GOODBYE_S, SystemClock())
    at_work("comparing what was trained with the plan and the journal")
    report = conclude_iteration(
        store,
        plan.iteration,
        prices,
        SystemClock(),
        egress_usd_per_gb={name: pool.egress_usd_per_gb for name, pool in rollout_pools.items()},
        requests=request_prices(plan.run_url),
    )
    # What other tasks wait for comes before what is for people.
    not_come = ""
    if last:
        release_lease(store, plan.execution)
        not_come = described(slots_not_come(store, plan.iteration, plan.execution))
    if not_come:
        log.warning(not_come)
    at_work("deleting what is no longer needed")
    try:
        swept = sweep(store, config.retention, newest=ITERATIONS_SWEPT)
        log.info("compacted %d iterations, deleted %d objects", len(swept.compacted), len(swept.deleted))
    except Exception as error:  # noqa: BLE001 - the iteration is committed, and the next conclusion deletes the rest
        log.warning("not everything that is no longer needed was deleted: %s", error)
    at_work("drawing the Deck")
    tabs = _inform(store, plan, written, config, report, not_come)
    return outcome_of(plan.run_url, report), tabs


def _inform(
    store: ObjectStore, plan: PlanReference, written: PlanRecord, config: RunConfig, report: ReportRecord, not_come: str
) -> dict[str, str]:
    """Write the metrics and the page of a committed iteration, log to trackers, and return the page's tabs."""
    run, history = read_run(store), _write_all_metrics(store, report)
    # What failed last, as this iteration is committed, and has not succeeded since.
    failed = last_failures(store, plan.iteration + 1)
    attempts = slot_failures(store, plan.iteration, plan.execution)
    evaluated = evaluations(store)
    notes = [*map(failure_line, failed), *_warnings(attempts.values(), report, not_come)]
    spent = spent_facts(run, [each.metrics for each in history])
    facts = {"run": store.url, **run_facts(run), **spent, "committed": charts.utc(report.created_at_s)}
    tabs = render(report, history, notes=notes, facts=facts, evaluated=evaluated)
    tabs = {"Overview": tabs.pop("Overview")} | responses_tab(store, plan.iteration) | tabs
    tabs["Plan"] = plan_tab(written.decisions, report.metrics)
    tabs |= host_tab(config)
    tabs["Configuration"] = styled([f"<pre>{markup(in_force(dump(config)))}</pre>"])
    store.put(layout.deck(plan.iteration), page(f"Gleaner, iteration {plan.iteration}", tabs).encode())
    if config.tracking.backends:
        # A tracker that fails or hangs is logged, and skipped.
        entry = tracked_iteration(report, config.tracking, run_id=run.nonce, run_url=store.url)
        track(entry, {backend: TRACKERS[backend] for backend in config.tracking.backends})
    return tabs


def _write_all_metrics(store: ObjectStore, report: ReportRecord) -> list[ReportRecord]:
    """Write the metrics of all iterations, and return the reports; only `report` if an earlier report is damaged."""
    try:
        return write_metrics(store)
    except CorruptObject as error:
        log.warning("iteration %d is committed, and %s is not written: %s", report.iteration, layout.METRICS, error)
        return [report]


def _warnings(attempts: Iterable[FailureRecord], report: ReportRecord, not_come: str) -> list[str]:
    """What people should know: failed attempts at slots, slots not started, estimated costs, responses all cut."""
    notes = [f"an attempt of slot {found.slot} failed, on {found.host}: {found.error}" for found in attempts]
    estimated = int(report.metrics["cost/lives_estimated"])
    if estimated:
        notes.append(f"the heartbeats of {estimated} members cannot be read: what they cost is an upper bound")
    for note in notes:
        log.warning("iteration %d: %s", report.iteration, note)
    cut = cut_line(report)
    if cut is not None:
        log.warning(cut)
    return [*([] if cut is None else [cut]), *notes, *([not_come] if not_come else [])]
