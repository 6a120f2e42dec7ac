"""Measurements of a run's machines, lengths and trainer from its last reports, in place of estimates.

One committed iteration is enough, and the last REPORTS_READ of several count together. Only reports are read.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from storage.records.planning_records import PoolObservation
from storage.records.records import TRAIN_POOL, ReportRecord
from storage.records.run import first_open, read_report
from storage.stores.connect import connect
from storage.stores.store import ObjectStore, StoreDenied, StoreUnavailable
from tasks.history.planning_inputs import REPORTS_READ

QUANTILES = 41
Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class PoolProbe:
    """The measurements of one pool.

    Attributes:
        step_s: (batch, seconds of a decoding step), ascending by batch.
        start_s: seconds from the start of a process until the weights are loaded; None if no member loaded weights.
        losses: lost machines.
        machine_h: machine hours in which `losses` were counted.
    """

    step_s: Points
    start_s: float | None
    losses: int
    machine_h: float


@dataclass(frozen=True, kw_only=True)
class ToolProbe:
    """The measurements of tools.

    Attributes:
        answers: mean answers of tools in a response.
        answer_s: mean seconds of an answer.
    """

    answers: float
    answer_s: float


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Measurements in a run's last iterations.

    Attributes:
        run_url: store of the run.
        first: first measured iteration.
        last: last measured iteration.
        pools: measurements by pool, with the trainer's machines.
        lengths: (quantile, tokens) of all graded responses.
        train_s_per_token: seconds of computing, without waiting, per generated token; None if not reported.
        train_fixed_s: seconds from the optimizer step to published weights; None if not reported.
        restore_s: seconds of restoring the trainer's stored state; None if not reported.
        control_s: seconds of an iteration without a working process: from the plan to the first process (except in the
            run's first iteration, which waits for machines), and from published weights to the report.
        in_turn: True if the trainer's process always started after the end of the crew, as on one machine that runs all
            tasks in turn; control_s then includes the time between.
        tools: measurements of tools; None if no response got an answer.
    """

    run_url: str
    first: int
    last: int
    pools: dict[str, PoolProbe]
    lengths: tuple[tuple[float, float], ...]
    train_s_per_token: float | None
    train_fixed_s: float | None
    restore_s: float | None
    control_s: float
    in_turn: bool
    tools: ToolProbe | None = None

    @property
    def source(self) -> str:
        span = f"iteration {self.last}" if self.first == self.last else f"iterations {self.first} to {self.last}"
        return f"measured in {self.run_url}, {span}"


@dataclass(frozen=True, kw_only=True)
class NoProbe:
    """The reason for a missing measurement."""

    reason: str


def probe_run(url: str) -> Probe | NoProbe:
    """The measurements of the run at a url. A store that does not answer or denies access is no error."""
    try:
        return probe(connect(url))
    except (StoreDenied, StoreUnavailable) as error:
        return NoProbe(reason=f"{url} cannot be read: {error}")


def probe(store: ObjectStore) -> Probe | NoProbe:
    """The measurements of the run in this store; raises CorruptObject for a run of another format."""
    committed = first_open(store)
    if not committed:
        return NoProbe(reason=f"{store.url} holds no committed iteration")
    first = max(0, committed - REPORTS_READ)
    reports = [read_report(store, iteration) for iteration in range(first, committed)]
    return Probe(
        run_url=store.url,
        first=first,
        last=committed - 1,
        pools=_pools(observation for report in reports for observation in report.pools),
        lengths=_quantiles([length for report in reports for length in report.lengths]),
        train_s_per_token=_per_token(reports),
        # A mean, because only some iterations may store a checkpoint.
        train_fixed_s=_mean(report.metrics.get("timing_s/publish") for report in reports),
        restore_s=_median(report.metrics.get("timing_s/restore") for report in reports),
        control_s=statistics.median(map(_control_s, reports)),
        in_turn=all(map(_is_in_turn, reports)),
        tools=_tools(reports),
    )


def _pools(observations: Iterable[PoolObservation]) -> dict[str, PoolProbe]:
    by_pool: dict[str, list[PoolObservation]] = defaultdict(list)
    for observation in observations:
        by_pool[observation.pool].append(observation)
    return {
        name: PoolProbe(
            step_s=_curve(of_pool),
            start_s=_median(one.start_s for one in of_pool),
            losses=sum(one.losses for one in of_pool),
            machine_h=sum(one.machine_s for one in of_pool) / 3600.0,
        )
        for name, of_pool in by_pool.items()
    }


def _curve(observations: Iterable[PoolObservation]) -> Points:
    """The median of each batch size over the iterations."""
    measured: dict[int, list[float]] = defaultdict(list)
    for observation in observations:
        for batch, step_s in observation.step_s:
            measured[batch].append(step_s)
    return tuple((batch, statistics.median(measured[batch])) for batch in sorted(measured))


def _quantiles(lengths: list[int]) -> tuple[tuple[float, float], ...]:
    at = np.linspace(0, 1, QUANTILES)
    return tuple(zip(at.tolist(), np.quantile(np.array(lengths), at).tolist(), strict=True))


def _per_token(reports: Iterable[ReportRecord]) -> float | None:
    """Mean seconds of computing per token; each iteration counts by its tokens. None if no report has the seconds."""
    told = [report.metrics for report in reports if "timing_s/compute" in report.metrics]
    tokens = sum(metrics["num_tokens"] for metrics in told)
    return sum(metrics["timing_s/compute"] for metrics in told) / tokens if tokens else None


def _tools(reports: Iterable[ReportRecord]) -> ToolProbe | None:
    """Mean answers per response and mean seconds per answer over the reports; None without answers."""
    told = [report for report in reports if "turns/answers" in report.metrics]
    answers = sum(report.metrics["turns/answers"] for report in told)
    if not answers:
        return None
    return ToolProbe(
        answers=answers / sum(len(report.lengths) for report in told),
        answer_s=sum(report.metrics["turns/tool_seconds"] for report in told) / answers,
    )


def _crew_span_s(report: ReportRecord) -> tuple[float, float] | None:
    """(start of the crew's first process, end of the crew's last process) in Unix seconds; None without a crew."""
    crew = [life for life in report.lives if life.pool != TRAIN_POOL]
    if not crew:
        return None
    return min(life.started_at_s for life in crew), max(life.ended_at_s for life in crew)


def _is_in_turn(report: ReportRecord) -> bool:
    span_s = _crew_span_s(report)
    return span_s is not None and report.train_started_at_s >= span_s[1]


def _control_s(report: ReportRecord) -> float:
    span_s = _crew_span_s(report)
    idle_s = report.created_at_s - report.train_ended_at_s
    if span_s is not None and report.iteration:
        idle_s += max(0.0, span_s[0] - (report.created_at_s - report.metrics["timing_s/iteration"]))
    if span_s is not None and _is_in_turn(report):
        idle_s += report.train_started_at_s - span_s[1]
    return max(0.0, idle_s)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
