"""Forecasts the hours and dollars of a run on several setups, simulated with the production planner, with a choice.

An interval covers trace windows and draws of lengths only, not wrong inputs: if an estimated step time is half the true
step time, the true hours double, outside of every interval.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from resources.spot_trace import TooFewPlacesError
from storage.records.forecast_records import ForecastRecord, Setting, SetupForecast, Spread
from storage.waiting import Progress, no_progress
from tasks.configuration.forecast import ForecastConfig
from tasks.configuration.run_config import ConfigError, RunConfig, dump, parse
from tasks.crew_model.accounts import NO_MACHINE
from tasks.crew_model.events import Stalled
from tasks.crew_model.flush_interval import best_flush_interval_s, flush_usd
from tasks.forecasting.availability import losses_per_h
from tasks.forecasting.inputs import gather
from tasks.forecasting.probe import NoProbe, Probe
from tasks.forecasting.results import SimulatedIteration, SimulatedRun
from tasks.forecasting.scenario import AvailabilityScenario, Scenario
from tasks.forecasting.setups import Setup, setups
from tasks.forecasting.simulate import simulate
from tasks.planning.explain import advice_to_stand
from tasks.preparing.checks import check_settings

LOW, HIGH = 0.1, 0.9
# Trace windows and draws of lengths for each setup.
SEEDS = 5
SENSITIVITY = (0.3, 3.0)
FLUSH_S = (1.0, 60.0)
# Share of an iteration: what a loss destroys delays it by as much, but the formula counts dollars alone.
FLUSH_SHARE_MAX = 0.02
# What a user pays for, and the ledger's names for it.
PARTS = {
    "useful": ("useful", "prefill", "train"),
    "wasted": ("wasted",),
    "starting": ("starting", "process", "transfer"),
    "idle": ("idle", "standing"),
    "requests and egress": NO_MACHINE,
}
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """A simulated run scaled to all iterations of the forecast."""

    hours: float
    tokens: float
    usd_parts: dict[str, float]
    usd_reported: float
    members: float

    @property
    def usd(self) -> float:
        return sum(self.usd_parts.values())


def forecast(
    config: RunConfig, probe: Probe | NoProbe, created_at_s: float, progress: Progress = no_progress
) -> ForecastRecord:
    """Compare the setups of a configuration; configuration, prices and probe decide the result.

    progress: called for each simulated run. Raises ValueError or LookupError with the missing or wrong field, and
    TraceError and ScenarioError for files that cannot be used.
    """
    if config.trainer.is_external:
        raise ValueError(
            f"trainer.placement: value {config.trainer.placement!r}; allowed for a forecast: another, "
            "because nothing is known of the seconds of a program's steps"
        )
    settings, inputs = config.forecast, gather(config, probe)

    def result(setup: Setup) -> SetupForecast:
        refused = refusal(config, setup.settings)
        if refused is not None:
            return SetupForecast(name=setup.name, settings=setup.settings, refused=refused)
        return _simulated(setup, settings, partial(progress, f"simulating {setup.name}"))

    compared = setups(config, inputs)
    results = [result(setup) for setup in compared]
    chosen, reason = recommend(results, config.planning.cost_weight, config.planning.usd_per_run_max)
    setup = next(setup for setup in compared if setup.name == chosen.name)
    reason += against_other_crew(chosen, results)
    reason += _in_favour_of_standing(config, chosen, inputs.state_s, _iteration_s(chosen, settings.iterations))
    reason += in_parts(setup, chosen, settings.iterations)
    snippet = setup.settings | _flush_setting(setup.scenario, _iteration_s(chosen, settings.iterations))
    refused = refusal(config, snippet)
    if refused is not None:
        raise RuntimeError(f"the recommended settings {snippet} are refused: {refused}")
    sensitivity = {}
    if any(pool.availability is not None for pool in setup.scenario.pools):
        for factor in SENSITIVITY:
            what = f"simulating {setup.name}, {factor:g} times the losses"
            again = _simulated(_hastened(setup, factor), settings, partial(progress, what))
            if again.usd is not None:
                sensitivity[f"{factor:g}"] = again.usd
    return ForecastRecord(
        created_at_s=created_at_s,
        iterations=settings.iterations,
        iterations_simulated=inputs.work.iterations,
        seeds=SEEDS,
        inputs=inputs.shown,
        setups=tuple(results),
        recommended=chosen.name,
        reason=reason,
        snippet=snippet,
        sensitivity=sensitivity,
    )


def refusal(config: RunConfig, settings: Mapping[str, Setting]) -> str | None:
    """The reason for which `gleaner check` would refuse the configuration with the given settings; None: no reason."""
    try:
        check_settings(parse(with_settings(dump(config), settings)))
    except ConfigError as error:
        return "; ".join(error.problems)
    except (LookupError, ValueError) as error:
        return str(error)
    return None


def with_settings(document: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The document of a configuration with `settings`, by path, in place of its own values."""
    whole = copy.deepcopy(dict(document))
    for path, value in settings.items():
        *parents, name = path.split(".")
        section = whole
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return whole


def recommend(
    results: Sequence[SetupForecast], cost_weight: float, usd_max: float | None = None
) -> tuple[SetupForecast, str]:
    """The setup with the least hours ** (1 - cost_weight) x dollars ** cost_weight, by medians, and the reason.

    At 0.5, one per cent of the hours counts as much as one per cent of the dollars, independent of further setups.
    usd_max: limit in dollars; a setup is left out if one run in ten costs more. Raises ValueError if no setup can be
    planned.
    """
    possible = [_Weighed(setup, setup.hours.median, setup.usd) for setup in results if setup.hours and setup.usd]
    if not possible:
        reasons = "; ".join(sorted({setup.refused or "" for setup in results}))
        raise ValueError(f"forecast: no setup can be planned: {reasons}")
    within = [one for one in possible if usd_max is None or one.usd.high <= usd_max]
    cheapest = min(within or possible, key=lambda one: one.usd.median)
    if not within:
        return cheapest.setup, (
            f"no setup stays within planning.usd_per_run_max {usd_max:g}; {cheapest.said}, is the cheapest"
        )
    fastest = min(within, key=lambda one: (one.hours, one.usd.median))
    best = min(within, key=lambda one: (one.score(cost_weight), one.usd.median))
    others = []
    if cheapest.usd.median < best.usd.median:
        others.append(f"the cheapest ({cheapest.setup.name}) {cheapest.against(best)}")
    if fastest.hours < best.hours:
        others.append(f"the fastest ({fastest.setup.name}) {fastest.against(best)}")
    if not others:
        return best.setup, f"{best.said}, is the fastest and the cheapest"
    return best.setup, f"{best.said}, weighs best at planning.cost_weight {cost_weight:g}: {', '.join(others)}"


def against_other_crew(chosen: SetupForecast, results: Sequence[SetupForecast]) -> str:
    """Hours and dollars of the chosen machines with a different kind of crew, as an ending of the reason.

    "" without such a setup in the comparison.
    """
    for other in results:
        differ = {name for name in chosen.settings | other.settings
                  if chosen.settings.get(name) != other.settings.get(name)}  # fmt: skip
        if differ == {"rollout.crew"} and other.hours and other.usd and chosen.hours and chosen.usd:
            said = _Weighed(other, other.hours.median, other.usd).against(
                _Weighed(chosen, chosen.hours.median, chosen.usd)
            )
            return f"; the same with rollout.crew {other.settings['rollout.crew']!r} {said}"
    return ""


def in_parts(setup: Setup, chosen: SetupForecast, iterations: int) -> str:
    """The longest execution of a standing crew, as an ending of the reason; "" if all iterations fit.

    Flyte starts a slot again after three losses in an execution, and not after the fourth (docs/guide/elastic.md). In
    the time in which a slot is lost once on average, one in fifty is gone at the end.
    """
    rates = [losses_per_h(pool.availability) for pool in setup.scenario.pools if pool.count]
    if setup.scenario.policy.crew != "standing" or chosen.hours is None or not max(rates, default=0.0):
        return ""
    part_h = 1.0 / max(rates)
    if part_h >= chosen.hours.median:
        return ""
    count = max(1, int(iterations * part_h / chosen.hours.median))
    return f". Run it in parts of about {part_h:.1f} h (--count {count}), because a slot that is lost often stays away"


def _in_favour_of_standing(config: RunConfig, chosen: SetupForecast, state_s: float, iteration_s: float) -> str:
    """Advice for trainer.placement "standing", as an ending of the reason; "" if the advice does not apply."""
    placed = chosen.settings.get("trainer.placement", config.trainer.placement)
    advice = advice_to_stand(str(placed), state_s, iteration_s)
    settings = {**chosen.settings, "trainer.placement": "standing", "planning.seeding": "off"}
    return f"; {advice}" if advice and refusal(config, settings) is None else ""


@dataclass(frozen=True)
class _Weighed:
    setup: SetupForecast
    hours: float
    usd: Spread

    def score(self, cost_weight: float) -> float:
        usd = self.usd.median
        return (1 - cost_weight) * math.log(self.hours) + (cost_weight * math.log(usd) if usd else -math.inf)

    @property
    def said(self) -> str:
        return f"{self.setup.name}, with {_hours(self.hours)} and {_usd(self.usd.median)}"

    def against(self, other: "_Weighed") -> str:
        """The difference to `other` in words, in per cent of its hours and dollars."""
        hours = self.hours / other.hours - 1
        slower = f"takes {_share(hours)} longer" if hours >= 0 else f"is {_share(-hours)} faster"
        if not other.usd.median:
            return f"{slower} and costs {_usd(self.usd.median)} more"
        usd = self.usd.median / other.usd.median - 1
        return f"{slower} and costs {_share(abs(usd))} {'more' if usd > 0 else 'less'}"


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"


def _hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"


def _usd(usd: float) -> str:
    return f"${usd:,.0f}" if usd >= 10 else f"${usd:.2f}"


def _simulated(setup: Setup, settings: ForecastConfig, progress: Callable[[int, int], None]) -> SetupForecast:
    """One run per seed. A setup refused by the planner, or with more machines than the trace has, gets no figures."""
    outcomes: list[_Outcome] = []
    try:
        for seed in range(SEEDS):
            progress(seed, SEEDS)
            run = simulate(setup.scenario, seed=seed)
            if run.stopped is not None or not run.iterations:
                refused = run.stopped or "no iteration ended"
                return SetupForecast(name=setup.name, settings=setup.settings, refused=refused)
            outcomes.append(_outcome(run, settings.iterations))
    except (Stalled, TooFewPlacesError) as error:
        return SetupForecast(name=setup.name, settings=setup.settings, refused=str(error))
    parts = {part: float(np.median([outcome.usd_parts[part] for outcome in outcomes])) for part in PARTS}
    return SetupForecast(
        name=setup.name,
        settings=setup.settings,
        members=float(np.median([outcome.members for outcome in outcomes])),
        hours=_spread([outcome.hours for outcome in outcomes]),
        usd=_spread([outcome.usd for outcome in outcomes]),
        tokens_per_s=_spread([outcome.tokens / (outcome.hours * _SECONDS_PER_HOUR) for outcome in outcomes]),
        usd_per_mtok=_spread([outcome.usd / outcome.tokens * 1e6 for outcome in outcomes]),
        usd_reported=_spread([outcome.usd_reported for outcome in outcomes]),
        usd_per_mtok_reported=_spread([outcome.usd_reported / outcome.tokens * 1e6 for outcome in outcomes]),
        usd_parts=parts,
    )


def _outcome(run: SimulatedRun, iterations: int) -> _Outcome:
    """The run scaled to `iterations`: its first half as simulated, and for the rest the mean of its second half.

    In the first half machines start and controllers settle. For fewer iterations than the half, only the first
    `iterations` of the run count.
    """
    settling = run.iterations[: min(iterations, len(run.iterations) // 2)]
    settled = run.iterations[len(run.iterations) // 2 :]

    def scaled(of: Callable[[SimulatedIteration], float]) -> float:
        return sum(map(of, settling)) + (iterations - len(settling)) * sum(map(of, settled)) / len(settled)

    return _Outcome(
        hours=scaled(lambda each: each.duration_s) / _SECONDS_PER_HOUR,
        tokens=scaled(lambda each: each.tokens),
        usd_parts={part: scaled(partial(_spent, names)) for part, names in PARTS.items()},
        usd_reported=scaled(lambda each: each.usd_reported),
        members=sum(sum(each.members.values()) for each in settled) / len(settled),
    )


def _spent(names: Sequence[str], iteration: SimulatedIteration) -> float:
    return sum(of_pool.get(name, 0.0) for of_pool in iteration.usd.values() for name in names)


def _spread(values: Sequence[float]) -> Spread:
    low, median, high = np.quantile(np.array(values), [LOW, 0.5, HIGH]).tolist()
    return Spread(low=low, median=median, high=high)


def _hastened(setup: Setup, factor: float) -> Setup:
    """The same setup with `factor` times as many losses."""

    def hastened(availability: AvailabilityScenario | None) -> AvailabilityScenario | None:
        return availability and replace(availability, rate_factor=availability.rate_factor * factor)

    pools = tuple(replace(pool, availability=hastened(pool.availability)) for pool in setup.scenario.pools)
    return replace(setup, scenario=replace(setup.scenario, pools=pools))


def _iteration_s(setup: SetupForecast, iterations: int) -> float:
    return 0.0 if setup.hours is None else setup.hours.median * _SECONDS_PER_HOUR / iterations


def _flush_setting(scenario: Scenario, iteration_s: float) -> dict[str, Setting]:
    """The best flush interval for the first pool with losses; empty if no pool can lose machines."""
    for pool in scenario.pools:
        if pool.availability is None or not pool.usd_per_h:
            continue
        usd = flush_usd(scenario.policy.put_usd, scenario.policy.get_usd, 0.0, pool.usd_per_h)
        best_s = best_flush_interval_s(usd, losses_per_h(pool.availability), pool.usd_per_h)
        if math.isfinite(best_s):
            most_s = min(FLUSH_S[1], max(FLUSH_S[0], FLUSH_SHARE_MAX * iteration_s))
            return {"rollout.flush_interval_s": round(min(max(best_s, FLUSH_S[0]), most_s), 1)}
    return {}
