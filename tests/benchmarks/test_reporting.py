import json

import pytest

from benchmarks.reporting import Target, finish, interleave, medians


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
