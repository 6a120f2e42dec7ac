"""The forecast task: predicts what a run will take, before anything is paid for."""

from flytekit import Deck, task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.pools import ControlPoolConfig, task_settings
from resources.visible_text import markup
from storage.clock import SystemClock
from storage.stores.connect import connect
from storage.stores.store import StoreUnavailable
from tasks.configuration.run_config import parse
from tasks.task_log import logged_task

DEFAULT_POOL = ControlPoolConfig()


@task(**task_settings(DEFAULT_POOL), enable_deck=True, deck_fields=())
def make_forecast(config: dict, save: bool) -> str:  # type: ignore[type-arg]
    """Compare setups for a run; returns the tables and the recommendation as text. The Deck shows the text.

    save: also write the forecast into the run's directory, to be compared with what the run then takes.
    """
    from tasks.forecasting.comparison import forecast  # noqa: PLC0415 - when the task runs
    from tasks.forecasting.probe import probe_run  # noqa: PLC0415
    from tasks.forecasting.realised import save_forecast  # noqa: PLC0415
    from tasks.forecasting.table import forecast_text  # noqa: PLC0415
    from tasks.reporting.deck import styled  # noqa: PLC0415

    settings = parse(config)
    with logged_task(f"run {settings.run.url}", None, "forecast"):
        record = forecast(settings, probe_run(settings.run.url), SystemClock().wall())
        if save:
            try:
                save_forecast(connect(settings.run.url), record)
            except StoreUnavailable as error:
                raise FlyteRecoverableException(str(error)) from error
    text = forecast_text(record)
    Deck("Forecast", styled([f"<pre>{markup(text)}</pre>"]))
    return text
