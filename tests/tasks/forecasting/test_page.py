"""The forecast as a page: what the text says, as tables and bars, and nothing of the user's as markup."""

import re
from dataclasses import replace

from storage.forecast_records import ForecastInput, SetupForecast, SharingForecast, Spread
from tasks.forecasting.page import forecast_page
from tasks.forecasting.table import COVERAGE
from tests.tasks.forecasting.test_realised import forecast
from tests.tasks.reporting.test_deck import Rows


def spread(median: float) -> Spread:
    return Spread(low=median / 2, median=median, high=median * 2)


PLANNED = SetupForecast(
    name="as configured <i>",
    settings={"rollout.crew": "standing"},
    members=4.0,
    hours=spread(12.0),
    usd=spread(100.0),
    tokens_per_s=spread(5000.0),
    usd_per_mtok=spread(0.5),
    usd_reported=spread(100.0),
    usd_per_mtok_reported=spread(0.5),
    usd_parts={"useful": 90.0, "idle": 10.0},
)
REFUSED = SetupForecast(name="none", settings={}, refused="no machine <b>")
RECORD = replace(
    forecast(PLANNED, REFUSED),
    inputs=(ForecastInput(name="model", value="7.6 billion parameters", source="counted from </pre><script>"),),
    reason="as configured & well, with 12.0 h",
    snippet={"rollout.crew": "standing"},
    sensitivity={"3": spread(150.0)},
)


def test_the_page_says_what_the_text_says():
    page = forecast_page(RECORD, "s3://bucket/<run>")
    rows = Rows(page).rows
    assert rows[1][:3] == ["as configured <i> *", "4.0", "12.0 (6.0 to 24.0)"]
    assert ["none", "", "cannot be planned: no machine <b>", "", "", ""] in rows
    assert ["as configured <i>", "90", "10"] in rows
    assert ["model", "7.6 billion parameters", "counted from </pre><script>"] in rows
    assert "<p>as configured &amp; well, with 12.0 h.</p>" in page
    assert "rollout:\n  crew: standing" in page
    assert "x3: 150 (75 to 300)" in page
    assert "<b>run</b> s3://bucket/&lt;run&gt;" in page
    assert COVERAGE in page


def test_the_page_has_headings_in_order_and_runs_nothing():
    page = forecast_page(RECORD, "runs/first")
    assert re.findall(r"<h(\d)>", page) == ["1", "2", "2", "2", "2"]
    assert not Rows(page).tags & {"script", "link", "img", "iframe", "style", "i", "a"}
    assert "Its dollars" not in forecast_page(replace(RECORD, sensitivity={}), "runs/first")


def test_the_page_says_what_sharing_does_where_a_setup_shares():
    sharing = SharingForecast(runs=3, slowdown=1.04, slowdown_others=1.08, idle=0.25, saving_max=0.19)
    page = forecast_page(replace(RECORD, setups=(replace(PLANNED, sharing=sharing), REFUSED)), "runs/first")
    assert ["as configured <i>", "3", "1.040", "1.080", "25%", "19.0% of all"] in Rows(page).rows
    assert "shared trainer" not in forecast_page(RECORD, "runs/first")
