"""`gleaner forecast` of figures that no machine has: refused with their bound, or forecast in finite numbers."""

import json
import warnings

import pytest
import yaml
from click.testing import CliRunner

from gleaner import main
from tests.forecast_documents import document

pytestmark = pytest.mark.usefixtures("few_simulations")

# By field: a value that simulations could not end with, or that would leave what floats can hold.
REFUSED = {
    "forecast.start_s": 1e9,
    "forecast.parameters_billions": 1e308,
    "forecast.train_s_per_token": 1e9,
    "forecast.step_s": {"1": 1e-300, "8": 0.02},
    "forecast.response_median": 1e308,
    "trainer.nnodes": 10**15,
    "trainer.nproc_per_node": 10**15,
    "pools.rollout.usd_per_hour": 1e308,
    "pools.rollout.egress_usd_per_gb": 1e308,
    "pools.train.usd_per_hour": 1e308,
}
# The ends of what is allowed, and machines that cost nothing.
EXTREME = [
    {"forecast.start_s": 86400.0},
    {"forecast.start_s": 0.0},
    {"forecast.train_s_per_token": 60.0},
    {"forecast.step_s": {"1": 1e-5, "8": 1e-5}},
    {"forecast.step_s": {"1": 10.0, "8": 10.0}},
    {"forecast.response_median": 1e9},
    {"pools.rollout.usd_per_hour": 1e6, "pools.train.usd_per_hour": 1e6, "pools.rollout.egress_usd_per_gb": 1e6},
    {"pools.train.usd_per_hour": 0.0},
    {"pools.rollout.usd_per_hour": 0.0},
    {"pools.rollout.usd_per_hour": 0.0, "pools.train.usd_per_hour": 0.0},
]


def forecast(folder, changes, *options):
    """The exit code and the output of a forecast of the usual configuration with these changes, by field."""
    whole = document(str(folder / "run"), forecast={"widths": [2]})
    for field, value in changes.items():
        *sections, name = field.split(".")
        section = whole
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(whole))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = CliRunner().invoke(main, ["forecast", str(file), *options], catch_exceptions=False)
    return done.exit_code, done.output


@pytest.mark.parametrize("field", REFUSED)
def test_a_figure_that_no_machine_has_is_refused_with_its_bound(tmp_path, field):
    code, output = forecast(tmp_path, {field: REFUSED[field]})
    assert code == 1
    [line] = output.splitlines()[1:]
    assert line.startswith(f"  {field}")
    assert "or equal to" in line


def not_finite(text):
    raise AssertionError(f"{text} in the forecast")


@pytest.mark.slow
@pytest.mark.parametrize("changes", EXTREME, ids=str)
def test_what_is_allowed_is_forecast_in_finite_numbers_or_refused_in_one_line(tmp_path, changes):
    code, output = forecast(tmp_path, changes, "--json")
    if code:
        [line] = output.splitlines()
        assert line.startswith("gleaner: forecast: no setup can be planned: no response has ended for ")
    else:
        assert json.loads(output, parse_constant=not_finite)["recommended"]
