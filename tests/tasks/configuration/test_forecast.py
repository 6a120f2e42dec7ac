from typing import Any

import pytest

from resources.spot_trace import PROCESSES
from tasks.configuration.forecast import ForecastConfig
from tasks.configuration.run_config import ConfigError, digest, parse
from tests.forecast_documents import document


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"seeds": 1}, r"forecast\.seeds: 1 given"),
        ({"iterations": 0}, r"forecast\.iterations: 0 given"),
        ({"step_s": {"many": 0.1}}, r"forecast\.step_s\.many"),
        ({"step_s": {}}, r"forecast\.step_s: \{\} given"),
        ({"mfu": 1.5}, r"forecast\.mfu: 1\.5 given"),
        ({"loss_process": "h100"}, r"forecast\.loss_process: \"h100\" given"),
        ({"tool_answers": 2.0, "tool_s": 1.0}, r"forecast\.tool_answers: value 2\.0; allowed only with turns"),
        ({"tool_answers": 2.0}, r"tool_s: value None; allowed with tool_answers 2\.0: at least 0"),
        ({"tool_s": 2.0}, r"tool_s: value 2\.0; allowed with tool_answers None: null"),
        ({"tool_answers": 0.0, "tool_s": 1.0}, r"forecast\.tool_answers: 0 given"),
        ({"sed": 1}, r"forecast\.sed: unknown field; did you mean 'seeds'"),
    ],
)
def test_what_is_wrong_is_named(section: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        parse(document(forecast=section))


def test_every_process_may_be_named():
    for name in PROCESSES:
        assert parse(document(forecast={"loss_process": name})).forecast.loss_process == name
    assert ForecastConfig().loss_process in PROCESSES


def test_a_batch_may_be_a_number_in_yaml():
    assert parse(document(forecast={"step_s": {1: 0.01, 64: 0.02}})).forecast.step_s == {"1": 0.01, "64": 0.02}


def test_it_is_no_part_of_what_a_run_is():
    assert digest(parse(document())) == digest(parse(document(forecast={"seeds": 9, "mfu": 0.2})))
