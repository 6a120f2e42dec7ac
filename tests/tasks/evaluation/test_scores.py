"""From graded responses to scores, against numbers worked out by hand."""

import pytest

from storage.records.records import GradedResponse
from tasks.configuration.data import DataConfig
from tasks.configuration.evaluation import SEED, EvaluationConfig
from tasks.evaluation.intervals import bootstrap_interval
from tasks.evaluation.scores import evaluated_prompts, score_metrics


def graded(response, reward, length, finish="stop", style=None):
    return GradedResponse(
        response=response,
        length=length,
        policy_length=length,
        finish_reason=finish,
        lineage=(),
        reward=reward,
        rewards={"exact": reward, "style": style},
    )


# Two prompts of four: the first has two correct, the second one; in an order in which they may have ended.
RESPONSES = [
    graded(6, 0.0, 10, "length"),
    graded(0, 1.0, 4),
    graded(1, 0.0, 6, style=0.5),
    graded(2, 1.0, 2),
    graded(3, 0.0, 8),
    graded(4, 1.5, 10),
    graded(5, 0.999, 10, "length"),
    graded(7, 0.0, 10, "length"),
]
CONFIG = EvaluationConfig(data=DataConfig(), num_generations=4)


def metrics():
    return score_metrics(evaluated_prompts(RESPONSES, ["a", "b"], 4, 1.0), RESPONSES, CONFIG)


def test_prompts_in_order_with_their_counts():
    first, second = evaluated_prompts(RESPONSES, ["a", "b"], 4, 1.0)
    assert (first.prompt_id, first.correct, first.clipped, first.reward, first.length) == ("a", 2, 0, 0.5, 5.0)
    assert (second.prompt_id, second.correct, second.clipped, second.length) == ("b", 1, 3, 10.0)
    assert second.reward == pytest.approx(2.499 / 4)
    assert evaluated_prompts(RESPONSES, ["a", "b"], 4, 0.9)[1].correct == 2


def test_a_prompt_too_many_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        evaluated_prompts(RESPONSES, ["a", "b", "c"], 4, 1.0)


def test_scores():
    found = metrics()
    assert found["val/pass@1"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert found["val/pass@2"] == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    assert found["val/pass@4"] == 1.0
    assert found["val/reward/mean@4"] == pytest.approx((0.5 + 2.499 / 4) / 2)
    assert found["val/rewards/exact/mean@4"] == pytest.approx(4.499 / 8)
    assert found["val/rewards/style/mean@4"] == 0.5  # of the one response to which it was applicable
    assert found["val/completions/mean_length"] == 7.5
    assert found["val/completions/clipped_ratio"] == 3 / 8
    assert (found["val/num_prompts"], found["val/num_tokens"]) == (2.0, 60.0)


def test_scores_have_intervals_over_prompts():
    found = metrics()
    assert (found["val/pass@1/low"], found["val/pass@1/high"]) == bootstrap_interval([0.5, 0.25], SEED)
    assert (found["val/pass@4/low"], found["val/pass@4/high"]) == pytest.approx((0.025**0.5, 1.0))  # exact: 2 of 2
    assert found["val/reward/mean@4/low"] <= found["val/reward/mean@4"] <= found["val/reward/mean@4/high"]


def test_a_single_prompt_has_no_interval_of_its_reward():
    few = RESPONSES[1:5]
    found = score_metrics(evaluated_prompts(few, ["a"], 4, 1.0), few, CONFIG)
    assert "val/reward/mean@4/low" not in found
    assert "val/pass@1/low" not in found
    assert found["val/pass@4/low"] == pytest.approx(0.025)
