"""The charts of a run: which there are, of what, and where the Deck has them."""

import math
import re

from storage.records.evaluation_records import EvaluationRecord
from tasks.reporting.run_charts import FUNCTIONS_MAX, curve, reward_chart, run_charts


def titles(drawings):
    return [re.search("<title>(.*?)</title>", drawing)[1] for drawing in drawings]


def test_evaluations_stand_on_the_chart_of_the_reward():
    def evaluated(digest, version, value):
        metrics = {"val/reward/mean@4": value, "val/reward/mean@4/low": 0.0, "val/pass@1": 1.0}
        return EvaluationRecord(
            weight_version=version, digest=digest, settings={}, metrics=metrics, prompts=(), created_at_s=0.0
        )

    history = {0: {"reward": 0.1}, 1: {"reward": 0.2}}
    one = reward_chart(history, [evaluated("a" * 32, 0, 0.05), evaluated("a" * 32, 2, 0.3)])
    assert ">evaluation<" in one
    assert one.count("<circle") == 4
    two = reward_chart(history, [evaluated("a" * 32, 0, 0.05), evaluated("b" * 32, 2, 0.3)])
    assert ">evaluation<" in two
    assert ">evaluation bbbbbb<" in two


def test_every_measured_quantity_has_a_chart():
    metrics = {
        "reward": 0.5,
        "rewards/exact/mean": 0.75,
        "rewards/exact/std": 0.1,
        "rewards/style/mean": 0.25,
        "frac_reward_zero_std": 0.25,
        "completions/clipped_ratio": 0.125,
        "kl": 0.01,
        "actor/grad_norm": 0.4,
    }
    assert titles(run_charts({0: metrics}, [])) == [
        "Reward",
        "Reward function exact",
        "Reward function style",
        "Groups without a learning signal",
        "Responses cut at the length limit",
        "KL to the reference",
        "Gradient norm",
    ]
    # Shares are drawn in percent.
    assert "responses: 12.5 at 0" in run_charts({0: metrics}, [])[4]


def test_a_quantity_that_the_run_does_not_have_has_no_chart():
    history = {0: {"reward": 0.5, "rewards/only/mean": 0.5, "kl": 0.0, "cost/usd_run": 0.0, "entropy": None}}
    assert titles(run_charts(history, [])) == ["Reward"]
    assert titles(run_charts({}, [])) == ["Reward"]
    paid = {0: {"reward": 0.5, "cost/usd_iter": 0.1, "cost/usd_run": 0.1}}
    assert titles(run_charts(paid, [])) == ["Reward", "Dollars so far"]


def test_the_tabs_share_the_charts_of_the_page_among_them():
    metrics = {f"rewards/{index}/mean": 0.5 for index in range(20)} | {"reward": 1.0, "turns/max": 2.0, "entropy": 1.0}
    tabs = [run_charts({0: metrics}, [], tab=tab) for tab in ("Overview", "Learning", "Lengths", "Cost")]
    assert [len(tab) for tab in tabs] == [1, FUNCTIONS_MAX + 1, 1, 0]
    assert [drawing for tab in tabs for drawing in tab] == run_charts({0: metrics}, [])


def test_long_runs_of_many_functions_stay_below_100_kb_a_tab():
    def metrics(iteration):
        value = 0.5 + 0.4 * math.sin(iteration)
        names = ("frac_reward_zero_std", "completions/clipped_ratio", "kl", "mismatch_kl", "actor/grad_norm", "entropy")
        functions = {f"rewards/function_with_a_name_{index}/mean": value for index in range(20)}
        return dict.fromkeys(names, value) | functions | {"reward": value}

    for iterations in (30, 200, 3000):
        drawn = run_charts({number: metrics(number) for number in range(iterations)}, [], tab="Learning")
        assert sum(map(len, drawn)) < 98_000, iterations


def test_a_curve_leaves_out_what_is_not_finite():
    history = {3: {"a": 1.0}, 4: {"a": math.nan}, 5: {"a": None}, 6: {}, 9: {"a": 2.0}}
    assert curve(history, "a", 100.0) == [(3.0, 100.0), (9.0, 200.0)]
