"""Forecasts in a run's directory: written on request, and compared with the iterations committed later."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from storage.digests import digest_of
from storage.records import canonical, layout, records
from storage.records.forecast_records import ForecastRecord, Setting, SetupForecast, Spread
from storage.records.records import ReportRecord
from storage.records.run import holds_run, read_plan, reports
from storage.stores.store import ConflictingRecord, ObjectStore
from tasks.configuration.iteration_config import resolved_in_force
from tasks.forecasting.setups import CONFIGURED

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class RealisedFigure:
    """A forecast figure and its realised value.

    Attributes:
        name: name and unit of the figure.
        form: format of the values.
        forecast: forecast values.
        realised: realised value.
    """

    name: str
    form: str
    forecast: Spread
    realised: float

    @property
    def error(self) -> float:
        """Relative error of the forecast's median: above 0 if the median was too high."""
        return self.forecast.median / self.realised - 1 if self.realised else float("inf")

    @property
    def within(self) -> bool:
        return self.forecast.low <= self.realised <= self.forecast.high


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A forecast and the realised figures of later iterations.

    Attributes:
        key: key of the forecast in the store.
        setup: name of the compared setup.
        is_same_setup: True if `setup` has the run's settings.
        iterations: number of iterations committed after the forecast.
        rows: figures per iteration.
    """

    key: str
    setup: str
    is_same_setup: bool
    iterations: int
    rows: tuple[RealisedFigure, ...]


def save_forecast(store: ObjectStore, record: ForecastRecord) -> str:
    """Write the forecast under its digest and keep earlier forecasts; returns the key.

    The store may be without a run. Raises CorruptObject for a run of another format.
    """
    holds_run(store)
    key = layout.forecast(digest_of(canonical.encode(record)))
    if not records.commit(store, key, record):
        raise ConflictingRecord(f"{key!r} holds other bytes than its name says")
    return key


def compare(store: ObjectStore) -> Comparison:
    """Compare the newest forecast that has later committed iterations with the figures of these iterations.

    Raises LookupError if no forecast has later committed iterations.
    """
    found = [(records.read(store, ForecastRecord, key), key) for key in store.list(layout.FORECASTS)]
    if not found:
        raise LookupError(f"{store.url} holds no forecast; make one with `gleaner forecast CONFIG --save`")
    history = reports(store)
    for record, key in sorted(found, key=lambda one: one[0].created_at_s, reverse=True):
        later = [report for report in history if _planned_at_s(report) >= record.created_at_s]
        if later:
            return _compared(store, record, key, later)
    raise LookupError(
        f"{store.url} holds no iteration that was begun after the forecast, so there is nothing to compare"
    )


def _compared(store: ObjectStore, record: ForecastRecord, key: str, later: list[ReportRecord]) -> Comparison:
    config = resolved_in_force(store, read_plan(store, later[-1].iteration))
    possible = [setup for setup in record.setups if setup.hours is not None and setup.usd is not None]
    same = next((setup for setup in possible if _is_setup_of(setup, config)), None)
    setup = same or next((setup for setup in possible if setup.name == CONFIGURED), None)
    if setup is None:
        raise LookupError(f"{key} holds no figures for the run's setup; forecast again, with --save")
    return Comparison(
        key=key,
        setup=setup.name,
        is_same_setup=same is not None,
        iterations=len(later),
        rows=_rows(setup, record.iterations, later),
    )


def _rows(setup: SetupForecast, iterations: int, later: list[ReportRecord]) -> tuple[RealisedFigure, ...]:
    if setup.hours is None or setup.usd is None or setup.tokens_per_s is None or setup.usd_per_mtok is None:
        raise ValueError(f"setup: value {setup.name!r}; allowed: one with figures")
    duration_s = sum(_durations_s(later))
    usd = sum(report.metrics["cost/usd_iter"] for report in later)
    tokens = sum(report.metrics["num_tokens"] for report in later)
    figures = (
        ("hours", "{:.4f}", _each(setup.hours, iterations), duration_s / _SECONDS_PER_HOUR / len(later)),
        ("dollars", "{:.4f}", _each(setup.usd_reported or setup.usd, iterations), usd / len(later)),
        ("tokens/s", "{:,.1f}", setup.tokens_per_s, tokens / duration_s),
        ("$ per million tokens", "{:.3f}", setup.usd_per_mtok_reported or setup.usd_per_mtok, usd / tokens * 1e6),
    )
    return tuple(
        RealisedFigure(name=name, form=form, forecast=spread, realised=realised)
        for name, form, spread, realised in figures
    )


def _durations_s(later: list[ReportRecord]) -> list[float]:
    """Seconds of each iteration: from plan to report, or between reports if iterations overlap; without pauses."""
    durations = [report.metrics["timing_s/iteration"] for report in later]
    between = [after.created_at_s - before.created_at_s for before, after in pairwise(later)]
    return [durations[0], *(min(pair) for pair in zip(durations[1:], between, strict=True))]


def _planned_at_s(report: ReportRecord) -> float:
    return report.created_at_s - report.metrics["timing_s/iteration"]


def _each(spread: Spread, iterations: int) -> Spread:
    return Spread(low=spread.low / iterations, median=spread.median / iterations, high=spread.high / iterations)


def _is_setup_of(setup: SetupForecast, config: Mapping[str, Any]) -> bool:
    """True if a run's configuration has a setup's settings; count_min is ignored with a fixed width."""
    fixed = setup.settings.get("planning.width") == "fixed"
    relevant = {path: value for path, value in setup.settings.items() if not (fixed and path.endswith(".count_min"))}
    has_more = bool(_at(config, "pools.more_rollout"))
    forecast_more = any(path.startswith("pools.more_rollout.") for path in relevant)
    return has_more == forecast_more and all(_at(config, path) == value for path, value in relevant.items())


def _at(config: Mapping[str, Any], path: str) -> Setting:
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value  # type: ignore[no-any-return]
