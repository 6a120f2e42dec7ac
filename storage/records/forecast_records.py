"""A forecast: inputs with sources, the setups compared, and the recommendation (docs/format.md section 3).

On request the record is written into the run's directory, for a later comparison with the run's real cost.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Setting = int | float | str | None


@dataclass(frozen=True, kw_only=True)
class ForecastInput:
    """A figure behind the forecast, in words, and its source: measured, configured or estimated."""

    __pydantic_config__ = STRICT
    name: str
    value: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over trace windows and seeds: the median, the 10 % quantile (low) and the 90 % quantile (high)."""

    __pydantic_config__ = STRICT
    low: float
    median: float
    high: float


@dataclass(frozen=True, kw_only=True)
class SetupForecast:
    """A setup, and the expected time and cost of all iterations.

    Attributes:
        settings: the configuration's fields that make the setup, by path.
        refused: why the setup cannot be planned; its figures are then missing.
        members: mean size of the crew.
        usd_parts: medians of the parts of `usd`, by purpose.
        usd_reported, usd_per_mtok_reported: dollars that reports will show, without machines on which no process of the
            run is.
        sharing, standing: comparison of shared trainers, and count of standing slots; optional for readers.
    """

    __pydantic_config__ = STRICT
    name: str
    settings: dict[str, Setting]
    refused: str | None = None
    members: float = 0.0
    hours: Spread | None = None
    usd: Spread | None = None
    tokens_per_s: Spread | None = None
    usd_per_mtok: Spread | None = None
    usd_reported: Spread | None = None
    usd_per_mtok_reported: Spread | None = None
    usd_parts: dict[str, float] = field(default_factory=dict)
    sharing: dict[str, int | float] | None = None
    standing: tuple[dict[str, int | float | str | None], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ForecastRecord:
    """forecasts/<digest>.json: a forecast of a run, simulated with `seeds` seeds for part of its iterations.

    Attributes:
        recommended: name of a setup.
        reason: one sentence for the recommendation.
        snippet: settings of the recommended setup, by path.
        sensitivity: dollars of the recommended setup, by factor on the rate of losses; empty if the setup cannot lose a
            machine.
    """

    KIND: ClassVar[str] = "forecast"
    __pydantic_config__ = STRICT
    created_at_s: float
    iterations: int
    iterations_simulated: int
    seeds: int
    inputs: tuple[ForecastInput, ...]
    setups: tuple[SetupForecast, ...]
    recommended: str
    reason: str
    snippet: dict[str, Setting]
    sensitivity: dict[str, Spread] = field(default_factory=dict)

    def setup(self, name: str) -> SetupForecast:
        return next(setup for setup in self.setups if setup.name == name)
