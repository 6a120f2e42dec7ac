"""The dollars of an iteration's scorers (`teacher.pool`), from their heartbeats, as a part of its report."""

from collections.abc import Mapping
from dataclasses import replace

from resources.pools import SCORING
from resources.prices import dollars
from storage.journal.liveness import read_heartbeat
from storage.records import layout
from storage.records.records import ReportRecord
from storage.stores.memory import NestedStore
from storage.stores.store import ObjectStore
from tasks.configuration.run_config import RunConfig

USD_SCORE = "cost/usd_score"


def scorer_prices(planned: RunConfig, in_force: RunConfig) -> dict[str, float]:
    """Dollars per hour of scorers by pool, with SCORING as the name of every pool that neither configuration has.

    A pool may be renamed while its scorers work: planned is the plan's configuration, in_force the conclusion's.
    """
    pools = planned.pools.scoring | in_force.pools.scoring
    prices = {name: pool.price_usd_per_h for name, pool in pools.items()}
    # Renamed twice: the last of them is the best guess.
    return prices if not prices else {SCORING: list(prices.values())[-1], **prices}


def with_scorers(store: ObjectStore, report: ReportRecord, usd_per_h: Mapping[str, float]) -> ReportRecord:
    """The report with the dollars of the scorers that can be read; unchanged without scorers.

    A scorer costs from the start of its process to its last heartbeat, at the price of its pool. usd_per_h: by pool, 0
    if missing; see `scorer_prices`.
    """
    others = usd_per_h.get(SCORING, 0.0)
    scoring = NestedStore(store, layout.scoring(report.iteration).rstrip("/"))
    found = [read_heartbeat(scoring, key) for key in scoring.list(layout.alive_all(report.iteration))]
    lives = [life for life in found if life is not None]
    if not lives:
        return report
    lasted_s = [max(0.0, life.updated_at_s - life.started_at_s) for life in lives]
    usd = sum(dollars(each, usd_per_h.get(life.pool, others)) for each, life in zip(lasted_s, lives, strict=True))
    metrics = dict(report.metrics)
    for name in ("cost/usd_iter", "cost/usd_run"):
        metrics[name] += usd
    tokens = metrics["num_tokens"]
    metrics["cost/usd_per_mtok"] = metrics["cost/usd_iter"] / tokens * 1e6 if tokens else 0.0
    return replace(report, metrics=metrics | {USD_SCORE: usd})
