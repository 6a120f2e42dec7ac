from typing import Any

import pytest

from tasks.configuration.run_config import ConfigError, digest, parse
from tests.forecast_documents import document


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"start_s": -1}, r"forecast\.start_s: -1 given"),
        ({"iterations": 0}, r"forecast\.iterations: 0 given"),
        ({"step_s": {"many": 0.1}}, r"forecast\.step_s\.many"),
        ({"step_s": {}}, r"forecast\.step_s: \{\} given"),
        ({"widhts": 1}, r"forecast\.widhts: unknown field; did you mean 'widths'"),
    ],
)
def test_what_is_wrong_is_named(section: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        parse(document(forecast=section))


def test_a_batch_may_be_a_number_in_yaml():
    assert parse(document(forecast={"step_s": {1: 0.01, 64: 0.02}})).forecast.step_s == {"1": 0.01, "64": 0.02}


def test_it_is_no_part_of_what_a_run_is():
    assert digest(parse(document())) == digest(parse(document(forecast={"iterations": 9, "start_s": 2.0})))
