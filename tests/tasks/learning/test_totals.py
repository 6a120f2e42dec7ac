import pytest
import torch

from tasks.learning.importance import log_ratio_counts
from tasks.learning.totals import StepTotals, combined

RATIOS = [f"importance/ratio_{name}" for name in ("min", "p01", "p50", "p99", "max")]


def test_totals_add_up_and_divide_by_hand():
    first = StepTotals(responses=(4, 5), tokens=3, loss=1.5, kl=0.3, entropy=6.0, clipped_low=1.0, ratio_max=1.2)
    second = StepTotals(responses=(2,), tokens=5, loss=0.5, kl=0.1, entropy=2.0, clipped_high=2.0, ratio_max=1.1)
    second += StepTotals(staleness=4, staleness_max=2)
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
            "trajectory_staleness": 0.5,
            "staleness_max": 2.0,
            **dict.fromkeys(RATIOS, 0.0),
        }
    )
    assert total.metrics("seq-mean-token-mean")["loss"] == pytest.approx(2 / 3)


def test_importance_is_of_the_whole_step_and_only_where_there_is_some():
    """Weights 3 and 1 in the first micro-batch, 2, 1 and 0 in the second."""
    first = StepTotals(responses=(1,), tokens=2, importance_tokens=2, importance=4.0, importance_square=10.0)
    second = StepTotals(responses=(2,), tokens=3, importance_tokens=3, importance=3.0, importance_square=5.0)
    second += StepTotals(importance_clipped=2.0)
    metrics = combined([first, second]).metrics("token-mean")
    found = {name: value for name, value in metrics.items() if name.startswith("importance/") and name not in RATIOS}
    assert found == pytest.approx(
        {"importance/ess": 49 / 75, "importance/weight_mean": 1.4, "importance/clipped_frac": 0.4}
    )
    unweighted = StepTotals(responses=(1,), tokens=1).metrics("token-mean")
    assert [name for name in unweighted if "importance" in name] == RATIOS


def test_ratios_to_the_sampler_are_of_all_micro_batches():
    """Ratios 1/2 and 1 in the first, 1, 1 and 4 in the second; p01 of five is the smallest, p99 the largest."""
    parts = []
    for ratios in ([0.5, 1.0], [1.0, 1.0, 4.0]):
        logs = torch.tensor([ratios], dtype=torch.float64).log()
        counts = log_ratio_counts(logs, torch.ones_like(logs, dtype=torch.bool))
        bounds = {"sampler_ratio_min": min(ratios), "sampler_ratio_max": max(ratios)}
        parts.append(StepTotals(responses=(0,), tokens=len(ratios), log_ratio_counts=tuple(counts.tolist()), **bounds))
    metrics = combined([*parts, StepTotals(left_out=2)]).metrics("token-mean")
    assert [metrics[name] for name in RATIOS] == pytest.approx([0.5, 0.5, 1.0, 4.0, 4.0], rel=1 / 128)
    assert (metrics["importance/ratio_min"], metrics["importance/ratio_max"]) == (0.5, 4.0)


def test_what_is_left_out_counts_only_where_nothing_else_is():
    trained, left = StepTotals(responses=(1, 2), tokens=5, loss=1.0), StepTotals(left_out=3)
    for mode, divisor in (("token-mean", 5.0), ("seq-mean-token-mean", 2.0)):
        assert combined([trained, left]).denominator(mode) == divisor
        assert combined([left, left]).denominator(mode) == 1.0
        assert set(combined([left]).metrics(mode).values()) == {0.0}


def test_an_empty_step_has_no_metrics():
    assert combined([]) == StepTotals()
    with pytest.raises(ValueError, match="0 responses with 0 tokens"):
        combined([]).metrics("token-mean")
