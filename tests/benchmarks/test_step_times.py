"""The estimate of a decode step beside published measurements; the guide's figures are the benchmark's."""

from pathlib import Path

import pytest

from benchmarks.step_times import FACTOR_MAX, MEASUREMENTS, targets, worst

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "forecast.md"


def test_every_measurement_is_met_within_the_bound():
    assert all(target.met for target in targets())
    assert worst(MEASUREMENTS) <= FACTOR_MAX
    held_back = [one for one in MEASUREMENTS if not one.fitted]
    assert len(held_back) > len(MEASUREMENTS) / 2


def test_an_estimate_without_its_constants_is_found_out(monkeypatch: pytest.MonkeyPatch):
    """Reading and multiplying alone: 0.5B would be almost three times as fast as it was measured."""
    for constant in ("STEP_S", "LAYER_S", "SUM_S"):
        monkeypatch.setattr(f"tasks.forecasting.engine_estimate.{constant}", 0.0)
    assert worst(MEASUREMENTS) > 2.5
    assert not all(target.met for target in targets())


def test_the_guide_says_how_many_rows_there_are_and_how_far_off_they_are():
    text = " ".join(GUIDE.read_text(encoding="utf-8").split())
    fitted = sum(one.fitted for one in MEASUREMENTS)
    ratios = [one.ratio for one in MEASUREMENTS]
    assert f"with {len(MEASUREMENTS)} published measurements" in text
    assert f"tokens per second is {min(ratios):.2f} to {max(ratios):.2f}." in text
    assert f"by {fitted} of the measurements; {len(MEASUREMENTS) - fitted} were held back" in text
    for source in {one.source for one in MEASUREMENTS}:
        assert source.accelerator.partition("-")[0] in text
