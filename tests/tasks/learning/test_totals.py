import pytest

from tasks.learning.totals import StepTotals, combined


def test_totals_add_up_and_divide_by_hand():
    first = StepTotals(responses=(4, 5), tokens=3, loss=1.5, kl=0.3, entropy=6.0, clipped_low=1.0, ratio_max=1.2)
    second = StepTotals(responses=(2,), tokens=5, loss=0.5, kl=0.1, entropy=2.0, clipped_high=2.0, ratio_max=1.1)
    total = combined([first, second])
    assert total.responses == (4, 5, 2)
    assert total.metrics("token-mean") == pytest.approx(
        {
            "loss": 0.25,
            "actor/pg_loss": 0.0,
            "kl": 0.05,
            "entropy": 1.0,
            "actor/ppo_kl": 0.0,
            "mismatch_kl": 0.0,
            "clip_ratio/low_mean": 0.125,
            "clip_ratio/high_mean": 0.25,
            "clip_ratio/region_mean": 0.375,
            "ratio_max": 1.2,
            "num_tokens": 8.0,
        }
    )
    assert total.metrics("seq-mean-token-mean")["loss"] == pytest.approx(2 / 3)


def test_an_empty_step_has_no_metrics():
    assert combined([]) == StepTotals()
    with pytest.raises(ValueError, match="0 responses with 0 tokens"):
        combined([]).metrics("token-mean")
