"""A forecast, and its comparison with the realised figures, as text for a terminal or a page."""

import io
from collections.abc import Mapping, Sequence

import yaml
from rich.table import Table

from storage.records.forecast_records import ForecastRecord, Setting, SetupForecast, Spread
from tasks.forecasting.comparison import with_settings
from tasks.forecasting.realised import Comparison
from tasks.reporting.terminal import Terminal

TEXT_WIDTH = 150
COVERAGE = (
    "In an interval, one in ten runs is below its low end and one in ten above its high end, over trace windows and "
    "draws of lengths. It does not cover wrong inputs: if nothing is measured, train one iteration and forecast again."
)


def forecast_text(record: ForecastRecord, width: int = TEXT_WIDTH) -> str:
    """The inputs with their sources, the setups, the recommendation, and the fields to set."""
    buffer = io.StringIO()
    console = Terminal(file=buffer, width=width)
    console.print(inputs_table(record))
    console.print(setups_table(record))
    console.print(parts_table(record))
    console.print(f"{simulated_line(record)} {COVERAGE}\n")
    console.print(f"Recommended: {record.reason}.")
    if record.sensitivity:
        console.print(sensitivity_line(record))
    console.print(f"\nSet:\n\n{snippet_yaml(record.snippet)}", end="")
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def simulated_line(record: ForecastRecord) -> str:
    """The number and length of the simulated runs, as a sentence."""
    simulated = f"{record.seeds} runs of {record.iterations_simulated} iterations for each setup, scaled to"
    return f"{simulated} {record.iterations}."


def sensitivity_line(record: ForecastRecord) -> str:
    """The recommended setup's dollars with more or fewer losses; "" without machines that can be lost."""
    spreads = [f"x{factor}: {_interval(usd, _money(usd))}" for factor, usd in record.sensitivity.items()]
    return f"Its dollars with other rates of losses: {'; '.join(spreads)}." if spreads else ""


def inputs_table(record: ForecastRecord) -> Table:
    """One row per input, with its source."""
    grid = Table("input", "value", "where from", title="made from")
    for each in record.inputs:
        grid.add_row(each.name, each.value, each.source)
    return grid


def setups_table(record: ForecastRecord) -> Table:
    """One row per setup: medians with intervals; the recommended setup is marked."""
    grid = Table(title=f"{record.iterations} iterations: median (10 % to 90 %)")
    for title in ("setup", "members"):
        grid.add_column(title, justify="left" if title == "setup" else "right")
    for title in ("hours", "dollars", "tokens/s", "$ per million tokens"):
        grid.add_column(title, justify="right")
    for setup in record.setups:
        name = f"{setup.name} *" if setup.name == record.recommended else setup.name
        grid.add_row(name, *_cells(setup))
    return grid


def parts_table(record: ForecastRecord) -> Table:
    """Median dollars of each setup by purpose."""
    grid = Table(title="dollars, by what they are spent on: medians")
    grid.add_column("setup")
    forecast = [setup for setup in record.setups if setup.usd is not None]
    for part in forecast[0].usd_parts if forecast else ():
        grid.add_column(part, justify="right")
    for setup in forecast:
        grid.add_row(setup.name, *(_dollars(usd) for usd in setup.usd_parts.values()))
    return grid


def comparison_text(comparison: Comparison, width: int = TEXT_WIDTH) -> str:
    """The forecast beside the realised figures."""
    buffer = io.StringIO()
    console = Terminal(file=buffer, width=width)
    title = f"{comparison.iterations} iterations against the forecast for '{comparison.setup}'"
    grid = Table("per iteration", "forecast", "realised", "error", "within the interval", title=title)
    for row in comparison.rows:
        form = row.form
        grid.add_row(
            row.name,
            _interval(row.forecast, form),
            form.format(row.realised),
            f"{row.error:+.1%}",
            "yes" if row.within else "no",
        )
    console.print(grid)
    if not comparison.is_same_setup:
        console.print(
            "The run's setup was not among the forecast ones; it is compared with the one that was configured then."
        )
    return buffer.getvalue()


def snippet_yaml(settings: Mapping[str, Setting]) -> str:
    """The fields by path as YAML for a configuration; `off` is quoted, because YAML reads a bare off as false."""
    document = with_settings({}, settings)
    text: str = yaml.safe_dump(document, sort_keys=False)
    return text


def _cells(setup: SetupForecast) -> Sequence[str]:
    if setup.hours is None or setup.usd is None or setup.tokens_per_s is None or setup.usd_per_mtok is None:
        return ["", f"cannot be planned: {setup.refused}"]
    return [
        f"{setup.members:.1f}",
        _interval(setup.hours, "{:.1f}" if setup.hours.median >= 1 else "{:.3f}"),
        _interval(setup.usd, _money(setup.usd)),
        _interval(setup.tokens_per_s, "{:,.0f}"),
        _interval(setup.usd_per_mtok, "{:.2f}"),
    ]


def _money(usd: Spread) -> str:
    """The format for values of about this size."""
    return "{:,.0f}" if usd.median >= 10 else "{:.3f}"


def _dollars(usd: float) -> str:
    return f"{usd:,.0f}" if usd >= 10 else f"{usd:.3f}"


def _interval(spread: Spread, form: str) -> str:
    return f"{form.format(spread.median)} ({form.format(spread.low)} to {form.format(spread.high)})"
