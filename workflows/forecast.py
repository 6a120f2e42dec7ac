"""A forecast: hours, dollars and tokens per second of a run on several setups; needs no GPU and no weights."""

from flytekit import workflow

from tasks.forecast import make_forecast
from workflows.config_input import Configuration


@workflow
def forecast(config: Configuration = {}, save: bool = False) -> str:  # type: ignore[assignment]  # noqa: B006
    """Predict a run's hours and dollars, and the setup that suits, by the section `forecast` of its configuration.

    Args:
        config: the run's configuration, a YAML or JSON file
        save: also write the forecast into the run's directory
    """
    text: str = make_forecast(config=config, save=save)
    return text
