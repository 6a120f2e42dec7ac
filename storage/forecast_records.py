"""A forecast: its inputs with their sources, the setups it compared, and its recommendation (docs/format.md section 3).

It is written into the run's directory on request, so that it can be compared with what the run then took.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Setting = int | float | str | None


@dataclass(frozen=True, kw_only=True)
class ForecastInput:
    """A figure that the forecast was made from, in words, and its source: measured, configured or estimated."""

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
class SharingForecast:
    """What it does to a setup that `runs` runs share the trainer's machines, itself included.

    slowdown, slowdown_others: how many times as long cycles take as with machines of its own that wait for its phases,
    of this run and of the slowest other. idle: the part of the time in which no run has the machines. saving_max: the
    most of all GPU-hours that sharing can save; 0 if neither rollout nor trainer has GPUs.
    """

    __pydantic_config__ = STRICT
    runs: int
    slowdown: float
    slowdown_others: float
    idle: float
    saving_max: float


@dataclass(frozen=True, kw_only=True)
class StandingPool:
    """A pool of a standing crew, whose slots are gone for the rest of an execution after a number of losses.

    losses_per_h: of one machine. share_gone: of the slots, at the end of one execution of all iterations. slots: of
    which `members` are expected to be left then; None: that would take twice as many or more, so it is better run in
    parts. part_h: hours of an execution in which a slot is lost once on average, and one in fifty is gone at the end.
    """

    __pydantic_config__ = STRICT
    pool: str
    members: int
    losses_per_h: float
    share_gone: float
    slots: int | None
    part_h: float


@dataclass(frozen=True, kw_only=True)
class SetupForecast:
    """A setup: the configuration's fields that make it (by path), and what all iterations should take on it.

    members: of the crew, on average. usd_parts: medians of `usd` by what it is spent on. usd_reported,
    usd_per_mtok_reported: the dollars that reports will show, which leave out a machine while no process of the run is
    on it. standing: the pools of a standing crew that can lose machines. sharing: None if the trainer's machines are
    not shared, or it is unknown with how many runs. refused: why the setup cannot be planned; its figures are then
    missing.
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
    sharing: SharingForecast | None = None
    standing: tuple[StandingPool, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ForecastRecord:
    """forecasts/<digest>.json: a forecast of a run, simulated with `seeds` seeds for part of its iterations.

    recommended: the name of a setup; reason: in one sentence; snippet: the settings for it, by path. sensitivity:
    dollars of the recommended setup by factor on the rate of losses; empty if it cannot lose a machine.
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
