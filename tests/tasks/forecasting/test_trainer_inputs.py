from typing import Any

import pytest

from tasks.configuration.run_config import RunConfig, parse
from tasks.forecasting.trainer_inputs import flops_per_parameter
from tests.forecast_documents import document


def config(**sections: Any) -> RunConfig:
    return parse(document(**sections))


@pytest.mark.parametrize(
    ("sections", "operations"),
    [
        ({}, 6),
        ({"trainer": {"gradient_checkpointing": True}}, 8),
        ({"lora": {"rank": 8}}, 4),
        ({"algorithm": {"kl_coef": 0.1}}, 8),
        ({"algorithm": {"num_mini_batches": 2}}, 8),
        ({"algorithm": {"num_mini_batches": 2, "old_logprobs": "sampler"}}, 6),
        ({"algorithm": {"num_epochs": 2}}, 14),
        ({"algorithm": {"preset": "ppo", "num_mini_batches": 1, "num_epochs": 1, "kl_coef": 0.0, "kl_in": "loss"}}, 14),
    ],
)
def test_operations_of_a_training_step(sections: dict[str, Any], operations: float):
    assert flops_per_parameter(config(**sections)) == operations
