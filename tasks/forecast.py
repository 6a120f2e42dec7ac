"""The forecast task: what a run will take, before anything is paid for."""

import html
import logging

from flytekit import Deck, task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.pools import ControlPoolConfig, task_settings
from storage.clock import SystemClock
from storage.connect import connect
from storage.store import StoreUnavailable
from tasks.configuration.run_config import parse
from tasks.forecasting.forecast import forecast
from tasks.forecasting.probe import probe_run
from tasks.forecasting.realised import save_forecast
from tasks.forecasting.table import forecast_text
from tasks.reporting.deck import styled

log = logging.getLogger(__name__)
DEFAULT_POOL = ControlPoolConfig()


@task(**task_settings(DEFAULT_POOL), enable_deck=True, deck_fields=())
def make_forecast(config: dict, save: bool) -> str:  # type: ignore[type-arg]
    """Compare fleets for a run; the tables and the recommendation as text, which are also the Deck.

    save: also write the forecast into the run's directory, to be held against what the run then takes.
    """
    settings = parse(config)
    record = forecast(settings, probe_run(settings.run.url), SystemClock().wall(), log.info)
    if save:
        try:
            save_forecast(connect(settings.run.url), record)
        except StoreUnavailable as error:
            raise FlyteRecoverableException(str(error)) from error
    text = forecast_text(record)
    Deck("Forecast", styled([f"<pre>{html.escape(text)}</pre>"]))
    return text
