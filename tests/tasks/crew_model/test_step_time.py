"""The estimate of prefill from measured steps; other parts of the curve are tested where they are used."""

import pytest

from resources.accelerators import accelerator
from resources.model_size import ModelSize
from tasks.crew_model.step_time import StepTime
from tasks.forecasting.engine_estimate import Device, prefill_tokens_per_s, step_points


@pytest.mark.parametrize("name", ["H100-80GB", "A100-80GB", "L4"])
@pytest.mark.parametrize("parameters", [7.6e9, 32.8e9])
def test_prefill_is_estimated_from_the_shortest_step_as_the_forecast_estimates_it_from_the_device(name, parameters):
    size = ModelSize(parameters=parameters, weight_bytes=2, kv_bytes_per_token=57_344.0, layers=28)
    device = Device(accelerator=accelerator(name), gpus=1, bandwidth_efficiency=0.6, mfu=0.35)
    curve = StepTime(step_points(size, device, 128, 1000.0))
    assert 0.5 < curve.prefill_tokens_per_s(128) / prefill_tokens_per_s(size, device) < 2.0


def test_prefill_is_never_slower_than_decoding():
    assert StepTime(((64, 0.1), (512, 0.2))).prefill_tokens_per_s(512) == pytest.approx(512 / 0.2)
    flat = StepTime(((1, 0.02), (8, 0.0202)))
    assert flat.prefill_tokens_per_s(64) == pytest.approx(150 / 0.02)
    assert flat.prefill_tokens_per_s(256) == pytest.approx(flat.tokens_per_s(256))
