import json

import pytest

from benchmarks.reporting import Target, finish, interleave, measured, medians, ratios


def test_every_arm_runs_once_per_round_in_turning_order():
    order = []
    arms = {name: (lambda name=name: order.append(name) or float(len(order))) for name in "abc"}
    results = interleave(arms, 3)
    assert "".join(order) == "abcbcacab"
    assert results == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}
    assert medians(results) == {"a": 6.0, "b": 4.0, "c": 5.0}


@pytest.mark.parametrize(
    ("value", "bound", "met"),
    [(4.0, ">= 4", True), (3.9, ">= 4", False), (0.01, "<= 0.01", True), (3, "< 3", False), (-5.0, "> -1e1", True)],
)
def test_bounds_are_compared_as_written(value, bound, met):
    assert Target("t", value, bound).met is met


def test_bound_that_is_no_comparison_is_refused():
    with pytest.raises(ValueError, match="bound: value '4x'"):
        Target("t", 1.0, "4x")


def test_last_line_is_the_json_object(capsys):
    rows = [{"measure": "a", "ours": 12345.6}, {"measure": "b", "other": 0.5}]
    finish("speed", rows, [Target("ratio", 3.0, ">= 4")], as_json=True, notes={"rounds": 2})
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert summary["benchmark"] == "speed"
    assert summary["rows"] == rows
    assert summary["targets"] == {"ratio": {"value": 3.0, "bound": ">= 4", "met": False}}
    assert summary["conditions"]["rounds"] == 2
    assert summary["conditions"]["cores"] >= 1
    assert any(line.startswith("MISSED ratio") for line in lines)
    finish("speed", rows, [], as_json=False)
    assert "{" not in capsys.readouterr().out


def test_a_target_is_met_only_if_its_whole_interval_is():
    assert Target("t", 0.5, "< 1", (-0.2, 0.9)).met
    assert not Target("t", 0.5, "< 1", (-0.2, 1.4)).met
    assert not Target("t", 4.2, ">= 4", (3.9, 4.6)).met


@pytest.mark.parametrize(
    ("count", "interval"),
    # Tables of the sign test: which ordered values enclose the median with at least 95 %.
    [(1, (1, 1)), (5, (1, 5)), (6, (1, 6)), (9, (2, 8)), (15, (4, 12)), (25, (8, 18))],
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(count, interval):
    found = measured([float(value) for value in range(count, 0, -1)])
    assert found.median == (count + 1) / 2
    assert found.interval == interval


def test_ratios_are_taken_round_by_round_and_shown_with_their_interval(capsys):
    found = ratios([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]).scaled(lambda ratio: -ratio)
    assert (found.median, found.interval) == (-2.0, (-2.0, -2.0))
    finish("speed", [], [measured([3.0, 4.0, 5.0]).target("ratio", ">= 4")], as_json=True)
    lines = capsys.readouterr().out.splitlines()
    assert "MISSED ratio: 4 [3, 5] (bound >= 4)" in lines
    assert json.loads(lines[-1])["targets"]["ratio"]["interval"] == [3.0, 5.0]
