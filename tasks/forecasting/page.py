"""A forecast as a page of Flyte's console: the recommendation, the setups, what they cost, and the inputs."""

from rich.table import Table

from resources.visible_text import markup
from storage.forecast_records import ForecastRecord
from tasks.forecasting.table import (
    COVERAGE,
    inputs_table,
    parts_table,
    sensitivity_line,
    setups_table,
    sharing_table,
    simulated_line,
    snippet_yaml,
    standing_advice,
)
from tasks.reporting import charts
from tasks.reporting.deck import styled, table


def forecast_page(record: ForecastRecord, run_url: str) -> str:
    """A piece of HTML without scripts, as the Deck's tabs are; it says what `forecast_text` says."""
    planned = [setup for setup in record.setups if setup.hours is not None and setup.usd is not None]
    hours = {setup.name: setup.hours.median for setup in planned if setup.hours is not None}
    usd = {setup.name: setup.usd.median for setup in planned if setup.usd is not None}
    sensitivity = sensitivity_line(record)
    return styled(
        [
            f"<h1>Forecast of {record.iterations:,} iterations</h1>",
            f'<p style="overflow-wrap:anywhere"><b>run</b> {markup(run_url)}</p>',
            "<h2>Recommended</h2>",
            f"<p>{markup(record.reason)}.</p>",
            *([f"<p>{markup(sensitivity)}</p>"] if sensitivity else []),
            *(f"<p>{markup(standing_advice(pool, record))}</p>" for pool in record.setup(record.recommended).standing),
            f"<p>Set:</p><pre>{markup(snippet_yaml(record.snippet))}</pre>",
            "<h2>Setups</h2>",
            charts.bars(hours, "Hours, in the median", "h"),
            charts.bars(usd, "Dollars, in the median", "$"),
            _as_html(setups_table(record)),
            f"<p>{markup(simulated_line(record))} {markup(COVERAGE)}</p>",
            "<h2>Dollars by what they are spent on</h2>",
            _as_html(parts_table(record)),
            *(
                ["<h2>Cycles with a shared trainer, as times as long as alone</h2>", _as_html(sharing_table(record))]
                if any(setup.sharing for setup in record.setups)
                else []
            ),
            "<h2>What it is made from</h2>",
            _as_html(inputs_table(record), numbers=False),
        ]
    )


def _as_html(grid: Table, *, numbers: bool = True) -> str:
    """The cells of a table for a terminal, as a table of a page."""
    columns = [list(map(str, column.cells)) for column in grid.columns]
    return table([str(column.header) for column in grid.columns], zip(*columns, strict=True), numbers=numbers)
